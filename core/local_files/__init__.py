"""The local files of a machine: a cache that persists between runs, and scratch directories."""
