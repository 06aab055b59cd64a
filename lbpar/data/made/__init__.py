"""Data sets that are made by formulas: random fields."""
