"""Ops, their loop declarations and networks. Global tensor shapes only: nothing here knows of processes."""
