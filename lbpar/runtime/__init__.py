"""What runs a program on one rank: executor, kernels bound to steps, transfers, feeds, initial state, update rules, trace."""
