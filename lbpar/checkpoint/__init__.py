"""Checkpoints of a run: whole tensors in files that know nothing of the grid that wrote them."""
