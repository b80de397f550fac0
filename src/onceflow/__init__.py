"""Exactly-once connectors for PySpark: Kafka in, keyed state, Postgres and MySQL out."""

__version__ = "0.1.0"
