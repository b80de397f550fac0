"""Spark finds `onceflow-postgres-changes` by this module's name, and takes `DefaultSource`."""

from contextlib import suppress

# Raised here it would take every other installed format with it.
with suppress(Exception):
    from onceflow.connectors.spark.formats import PostgresChangesFormat as DefaultSource

    __all__ = ["DefaultSource"]
