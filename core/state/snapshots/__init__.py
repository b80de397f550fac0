"""Snapshots in the canonical form, and functions that read and write them without a store."""
