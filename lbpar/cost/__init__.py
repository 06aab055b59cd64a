"""Prices: machine descriptions, the price of every step of a program, and memory."""
