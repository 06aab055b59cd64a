"""oneDNN's C API (version 3) bound with cffi: finding the library, primitives on NumPy memory, and the primitives
that the onednn engine uses. Nothing here is compiled; nothing outside `lbpar.engine.onednn.engine` imports it.
"""
