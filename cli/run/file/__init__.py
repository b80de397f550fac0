"""Jobs as TOML files: sources, steps and sinks under the names that they have in Python."""
