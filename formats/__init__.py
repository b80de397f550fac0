"""Formats of records: from bytes to Arrow columns and back."""
