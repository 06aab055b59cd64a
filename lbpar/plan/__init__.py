"""Planning: candidate op grids, the exact search over them, memory limits, named strategies and explanations.

Nothing here imports MPI or CuPy, so planning for any number of processes runs on a laptop.
"""
