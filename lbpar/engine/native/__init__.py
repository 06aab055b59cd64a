"""Passes in C that no library has (norms, losses, updates), compiled at first use and optional."""
