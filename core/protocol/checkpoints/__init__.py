"""The rules of checkpoints: their schedule, the alignment of barriers, and their content."""
