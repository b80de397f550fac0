"""The conversion between JSON, or JSON Schema, and Arrow."""
