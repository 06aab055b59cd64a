"""Exact minimisation of node plus edge tables. Knows nothing of networks, processes or machines."""
