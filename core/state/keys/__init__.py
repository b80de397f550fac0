"""Keys of a batch: their columns, their hashes and groups, and where each has its entry."""
