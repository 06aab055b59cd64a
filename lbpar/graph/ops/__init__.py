"""The ops: each declares its loops once, with the kernels that run over them."""
