"""Optimizers on local blocks of sharded parameters.

Every rule has its engine update arrays in place and knows nothing of ranks. What spans ranks (the norms of LARS, LAMB and of
gradient clipping) comes through one callback, `lbpar.runtime.optim.norms.Norms`, so the result does not depend on the
grid. `lbpar.runtime.optim.make.make_optimizer` builds a rule from its name.
"""
