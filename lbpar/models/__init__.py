"""Where networks come from: by name, layer by layer from a run file, from an ONNX file, from a function of the user.

``load.py`` chooses. Of the networks by name each family has a small builder file, and ``registry.py`` lists them. Nodes with
parameters are called as torchvision's modules are (``layer1.0.conv1``), so weights can be exchanged with PyTorch through
``torch_names.py``. To add a network, write a function that returns a graph and add it to the registry.
"""
