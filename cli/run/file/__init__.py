"""A job as a TOML file: sources, steps and sinks under the names that they have in Python."""
