"""The engine for CUDA devices: arrays by CuPy, kernels of our own (``kernels/*.cu``)."""
