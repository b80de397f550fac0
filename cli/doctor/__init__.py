"""`onceflow doctor`: whether what a job needs is there, and what mends it where it is not."""
