"""Training: the loop, evaluation and prediction, schedules, metrics, and what a run directory holds."""
