"""Formats of record values, for source and sink: their schemas, and who keeps those."""
