"""The base of sinks: fences, staged rows and columns that all sinks share."""
