"""Parity: the same training step on P ranks and on one, in float64, compared tensor by tensor."""
