"""Formats that datasets come in: IDX, NPZ, CIFAR, pictures, volumes, folders of them, other HDF5 files."""
