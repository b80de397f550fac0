"""`onceflow checkpoints`: what a job has in checkpoint storage, and savepoints."""
