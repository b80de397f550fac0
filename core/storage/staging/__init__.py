"""Rows that wait in checkpoint storage: for their commit, or to be read by a source."""
