"""Local kernels on one device behind one interface (`base.Engine`): NumPy as the reference, libraries where faster.

An engine knows arrays and windows, nothing of ranks, grids or layouts. `registry.get_engine` picks one by name.
"""
