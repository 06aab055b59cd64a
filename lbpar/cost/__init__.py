"""Prices: machine descriptions, the price of every step of a program, memory, and the formulas of the papers."""
