"""JSON and JSON Schema: schemas as Arrow's, and values both ways."""
