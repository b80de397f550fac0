"""The progress of a Structured Streaming query, read from its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from onceflow.connectors.spark.streaming.checkpoint_location import CheckpointLocation
from onceflow.core.errors import StorageError
from onceflow.core.spi.connector import Area, Finding


def check_query(location: str) -> Sequence[Finding]:
    """Return the query's id, its sink id and its next batch as findings."""
    area = Area("query")
    checkpoint = CheckpointLocation(location)
    try:
        query_id = checkpoint.query_id()
        planned, committed = checkpoint.batches()
    except StorageError as error:
        return [
            area.problem(
                str(error),
                "the checkpointLocation of a query that was started, visible from this machine",
                f"ls {checkpoint}; a query creates it at its first start",
            )
        ]
    findings = [
        area.ok(f"query {query_id} at {checkpoint} writes under sink id {checkpoint.sink_id()}")
    ]
    if planned is None:
        return [*findings, area.ok("it has planned no batch yet")]
    last = -1 if committed is None else committed
    if planned <= last:
        return [*findings, area.ok(f"batch {last} is the last one, and is done")]
    if planned == last + 1:
        text = (
            f"batch {planned} is planned but not done: it runs now, or the next start will repeat"
            " it"
        )
        return [*findings, area.ok(f"{text}; the sink knows whether the batch is already decided")]
    return [
        *findings,
        area.problem(
            f"batches {last + 1} to {planned} are planned, but none is done",
            "Spark's two logs to differ by at most one batch",
            f"restore {checkpoint}/offsets and {checkpoint}/commits from the same copy",
        ),
    ]
