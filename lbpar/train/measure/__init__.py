"""`machine: auto`: what the processes of this job reach, measured in about two seconds with their own engine and transport.

Small networks are lowered and executed step by step, and moves are carried out as training does, so the kernels and messages measured are
those that programs are made of, with their packing and their share of Python.
"""
