"""Bytes between ranks: one interface (``base``) and its ways to run.

``single`` is one rank, ``mpi`` is real processes, ``virtual`` is P ranks inside one process, ``checked`` wraps any of
them and finds ranks that disagree, ``launch`` starts and ends a job. A transport knows the grid, and nothing of layers.
"""
