"""The transport of messages and record batches between processes, by Arrow Flight."""
