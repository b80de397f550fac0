"""Conversions of users' schemas and Python's values to Arrow schemas and columns."""
