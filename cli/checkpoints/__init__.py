"""The command `onceflow checkpoints`, for checkpoints and savepoints in storage."""
