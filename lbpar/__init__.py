"""lbpar: train 2-D and 3-D convolutional networks across many processes, with a grid of its own for each layer."""

__version__ = "0.1.0"
