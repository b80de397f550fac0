"""Snapshots in the canonical form, read and written without a store, too."""
