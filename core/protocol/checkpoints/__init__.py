"""When checkpoints are taken, how barriers are aligned, and what a checkpoint is made of."""
