"""Spark's own face of the sources and sinks; the layer that may import all others. Empty so far."""
