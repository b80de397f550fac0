"""`onceflow config`: every setting of pipelines, and who says it."""
