"""State read by the classes that Spark calls, in this process."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from onceflow.connectors.spark.arrow_rows import arrow_schema
from onceflow.connectors.spark.readers.state import StateFrameReader, state_schema


def state(path: str, **options: str) -> pa.Table:
    """Read as Spark does: the schema, the tasks, then the batches of each."""
    given = {"path": path, **options}
    schema = state_schema(given)
    reader = StateFrameReader(given, schema)
    batches = [batch for task in reader.partitions() for batch in reader.read(task)]
    return pa.Table.from_batches(batches, arrow_schema(schema))


def by_key(rows: pa.Table) -> dict[Any, Any]:
    """Return the value of each key; of a key of several columns, by a tuple of them."""
    nested = pa.types.is_struct(rows.schema.field("key").type)
    keys: list[Any] = rows["key"].to_pylist()
    keys = [tuple(key.values()) for key in keys] if nested else keys
    found: dict[Any, Any] = dict(zip(keys, rows["value"].to_pylist(), strict=True))
    assert len(found) == len(rows), "a key comes once"
    return found
