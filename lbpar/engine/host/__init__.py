"""NumPy functions of arrays, for ops that no engine has kernels of its own for (`Engine.on_host`)."""
