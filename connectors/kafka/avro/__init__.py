"""Avro: its schemas as Arrow's, and values both ways."""
