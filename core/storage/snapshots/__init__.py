"""Checkpoints and savepoints in files: written once, verified on every read."""
