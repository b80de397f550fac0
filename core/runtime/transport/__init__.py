"""How messages and record batches travel between processes: Arrow Flight."""
