"""Whose a batch's rows are, so that watermarks are kept for each partition."""

from __future__ import annotations

import pyarrow as pa

from onceflow.sources.kafka.messages import METADATA_FIELDS
from onceflow.sources.kafka.rows import rows_by_partition

SCHEMA = pa.schema(METADATA_FIELDS[:3])


def test_runs_of_rows_are_told_by_partition() -> None:
    rows = pa.record_batch(
        [["a", "a", "a", "b", "b", "a"], [0, 0, 1, 1, 1, 1], [7, 8, 3, 0, 1, 4]], schema=SCHEMA
    )
    assert rows_by_partition(rows) == [("a-0", 2), ("a-1", 1), ("b-1", 2), ("a-1", 1)]


def test_rows_that_do_not_say_where_they_are_from_tell_nothing() -> None:
    rows = pa.record_batch([[1, 2]], names=["amount"])
    assert rows_by_partition(rows) is None
