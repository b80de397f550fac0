"""Arrow schemas and columns, made from what users write and from Python's values."""
