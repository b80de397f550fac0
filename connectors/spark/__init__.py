"""The formats for Spark's `readStream`, `writeStream`, `read` and `write`."""
