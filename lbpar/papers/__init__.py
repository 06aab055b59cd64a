"""The cost models of the papers that lbpar builds on, as pure functions of plain numbers.

``networks`` builds the networks as lbpar's graphs, ``records`` describes their layers, ``collectives`` holds the alpha-beta costs;
``gholami`` (integrated model, batch and domain parallelism), ``optcnn``, ``pase``, ``dryden`` (stationary-X, -Y, -W) and ``paradl`` hold one
paper each. They price what was published, not the programs that lbpar executes.
"""
