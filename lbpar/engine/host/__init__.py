"""NumPy functions of arrays, for ops that most engines have no kernels of their own for (`Engine.on_host`)."""
