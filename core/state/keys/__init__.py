"""The keys of a batch: their columns, hashes, key groups and entries."""
