"""Training: the loops, the optimiser, the checkpoints."""
