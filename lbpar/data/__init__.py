"""Samples from HDF5 files or made up on the spot, read box by box.

``open.py`` opens, ``hdf5.py`` and ``synthetic.py`` are the two kinds; ``sampler.py`` fixes the order of an epoch,
``augment.py`` changes samples, ``prefetch.py`` reads ahead. ``make.py`` and ``convert.py`` write files. Everything
random depends on seeds, epochs and global indices only, so every process grid sees the same training run.
"""
