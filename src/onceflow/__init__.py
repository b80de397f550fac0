"""Exactly-once connectors for PySpark: Kafka in, keyed state, Postgres and MySQL out."""

from __future__ import annotations

__version__ = "0.1.0"
