"""The cost models of the papers that lbpar builds on, as pure functions of plain numbers.

``records`` describes layers, ``collectives`` the alpha-beta costs they share; ``gholami`` (integrated model, batch and domain
parallelism), ``optcnn``, ``pase``, ``dryden`` (stationary-X, -Y, -W) and ``paradl`` hold one paper each. None of
them knows lbpar's own graph, layouts or programs: they reproduce what was published, not what lbpar executes.
"""
