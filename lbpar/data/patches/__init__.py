"""Training on patches of large samples, and inference on whole ones by windows that overlap."""
