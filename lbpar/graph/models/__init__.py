"""Networks by name: a small builder file per family, and ``registry.py`` that lists them.

Nodes with parameters are called as torchvision's modules are (``layer1.0.conv1``), so weights can be exchanged with
PyTorch through ``torch_names.py``. To add a network, write a function that returns a graph and add it to the registry.
"""
