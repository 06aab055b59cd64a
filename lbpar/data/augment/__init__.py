"""Random changes of training samples, each a dataset of another: it reads what a box needs, and makes only that box."""
