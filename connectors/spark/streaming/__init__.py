"""The sinks of streaming queries: their writer, `foreachBatch`, and facts in checkpoints."""
