"""The rows in checkpoint storage that wait for their commit, or for a source to read them."""
