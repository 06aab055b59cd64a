"""Programs: the list of steps that every rank runs, made from a graph and a plan. Pure data, no MPI.

``steps`` names them; ``lowering`` makes them; ``order`` lets communication overlap computation and frees buffers.
"""
