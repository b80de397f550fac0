"""The types of keys and values: their encoding, their names in snapshots, and allowed changes."""
