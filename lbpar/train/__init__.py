"""Training: the executor, optimizers, schedules, metrics, checkpoints and the loop that ties them together."""
