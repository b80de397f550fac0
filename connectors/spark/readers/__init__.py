"""The readers of the formats, for `read` and `readStream`: their tasks and rows."""
