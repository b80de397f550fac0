"""Types of keys and values: their bytes, their names in snapshots, and which may change."""
