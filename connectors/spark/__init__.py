"""Sinks and sources as formats of Spark's `readStream`, `writeStream`, `read` and `write`."""
