"""Grids, blocks, layouts and transitions: integer arithmetic, no MPI.

``grid`` factors the processes; ``runs`` cuts index ranges; ``layout`` says where each block of a tensor lives;
``transition`` gives the moves from one layout to another; ``exchange`` says what one rank sends and receives.
"""
