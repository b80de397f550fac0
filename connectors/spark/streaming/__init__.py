"""Sinks of streaming queries: their writer, `foreachBatch`, what their checkpoints say of them."""
