"""Random pipelines, run in one process by the engine's parts, and held against a plain model."""
