"""The format `onceflow-checkpoints`: a row for each checkpoint and savepoint in a storage.

An incomplete entry (an unfinished savepoint, a damaged state file) is a row with its known values,
and describes the fault in `problem`. So one damaged file does not hide other entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from onceflow.connectors.spark.arrow_rows import fit, spark_schema
from onceflow.connectors.spark.options.state import CHECKPOINTS_READ, JobLocation
from onceflow.core.errors import CheckpointError, StateError, StorageError
from onceflow.core.protocol.checkpoints.snapshots import (
    OperatorSnapshot,
    committables_of,
    handles_of,
)
from onceflow.core.state.readers.operator_columns import operator_states
from onceflow.core.state.readers.stored import list_pieces, read_metas_by_name
from onceflow.core.state.states.operator_state import Mode
from onceflow.core.storage.stored_checkpoints import (
    StoredCheckpoint,
    checkpoints_of,
    open_job,
    savepoints_of,
)

_STATE = pa.struct([("name", pa.string()), ("kind", pa.string()), ("type", pa.string())])
_OPERATOR = pa.struct(
    [
        ("uid", pa.string()),
        ("subtasks", pa.int32()),
        ("size_bytes", pa.int64()),
        ("states", pa.list_(_STATE)),
    ]
)
CHECKPOINTS = pa.schema(
    [
        ("job", pa.string()),
        ("id", pa.int64()),
        ("kind", pa.string()),
        ("path", pa.string()),
        ("attempt", pa.int64()),
        ("triggered_at", pa.timestamp("us", "UTC")),
        ("completed_at", pa.timestamp("us", "UTC")),
        ("parallelism", pa.int32()),
        ("max_parallelism", pa.int32()),
        ("final", pa.bool_()),
        ("size_bytes", pa.int64()),
        ("files", pa.int32()),
        ("transactions", pa.int32()),
        ("operators", pa.list_(_OPERATOR)),
        ("problem", pa.string()),
    ]
)
"""The columns. `path` is the path of a savepoint."""


class CheckpointsReader(DataSourceReader):
    """A reader of the entries that exist when the task runs."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        """Parse the options. Sends no request yet."""
        self._place = CHECKPOINTS_READ.make(options).location
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return one task for each job. Runs on the driver, once for each plan.

        Raises:
            ConfigError: The storage has no such job. The message names the existing ones.
        """
        storage, job = self._place.storage, self._place.job
        jobs = [open_job(storage, job).job] if job else list(storage.open("_").jobs())
        return [InputPartition(job_name) for job_name in jobs] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one job. Runs in a task."""
        if partition.value is not None:
            # Return all rows of a job at once: a listing is small, and one batch is consistent.
            rows = list(_rows(JobLocation(self._place.storage, partition.value)))
            if rows:
                batch = pa.RecordBatch.from_pylist(rows, schema=CHECKPOINTS)
                yield from fit([batch], self._schema)


def checkpoints_schema() -> StructType:
    """Return the columns of every listing."""
    return spark_schema(CHECKPOINTS)


def _rows(location: JobLocation) -> Iterator[dict[str, Any]]:
    job = open_job(location.storage, location.job)
    for checkpoint in checkpoints_of(job):
        yield _row(checkpoint)
    for savepoint in savepoints_of(location.storage, job):
        if isinstance(savepoint, StoredCheckpoint):
            yield _row(savepoint)
        else:
            yield {"job": job.job, "kind": "savepoint", "problem": str(savepoint)}


def _row(stored: StoredCheckpoint) -> dict[str, Any]:
    completed = stored.completed
    problems: list[str] = []
    operators = [
        _operator(stored, uid, problems)
        for uid in sorted({o.uid for s in completed.snapshots for o in s.operators})
    ]
    return {
        "job": stored.job,
        "id": completed.checkpoint,
        "kind": stored.kind,
        "path": stored.name if stored.savepoint else None,
        "attempt": completed.attempt,
        # Arrow reads numbers as microseconds.
        "triggered_at": completed.triggered_at_ms * 1000,
        "completed_at": completed.completed_at_ms * 1000,
        "parallelism": completed.parallelism,
        "max_parallelism": completed.max_parallelism,
        "final": completed.final,
        "size_bytes": sum(operator["size_bytes"] for operator in operators),
        "files": len(handles_of(completed.snapshots)),
        "transactions": len(committables_of(completed)),
        "operators": operators,
        "problem": "; ".join(problems) or None,
    }


def _operator(stored: StoredCheckpoint, uid: str, problems: list[str]) -> dict[str, Any]:
    parts = stored.completed.operator(uid)
    handles = [handle for _, part in parts for handle in (*part.keyed, *part.raw)]
    return {
        "uid": uid,
        "subtasks": len(parts),
        "size_bytes": sum(handle.size_bytes for handle in handles),
        "states": _states(stored, parts, problems),
    }


def _states(
    stored: StoredCheckpoint, parts: Sequence[tuple[int, OperatorSnapshot]], problems: list[str]
) -> list[Mapping[str, str | None]]:
    states: list[Mapping[str, str | None]] = []
    try:
        pieces = list_pieces(parts, stored.completed.max_parallelism)
        metas = read_metas_by_name(pieces, stored.reader).values()
        states += [{"name": m.name, "kind": m.kind, "type": m.signature} for m in metas]
    except (CheckpointError, StateError, StorageError) as error:
        problems.append(str(error))
    try:
        states += [
            {"name": state.name, "kind": _KINDS[state.mode], "type": state.type}
            for state in operator_states(parts, stored.reader)
        ]
    except (CheckpointError, StateError, StorageError) as error:
        problems.append(str(error))
    lists = sorted({name for _, part in parts for name in part.lists})
    states += [{"name": name, "kind": _KINDS["split"], "type": None} for name in lists]
    return states


_KINDS: Mapping[Mode, str] = {
    "split": "operator list",
    "union": "operator union list",
    "broadcast": "broadcast",
    "raw-keyed": "raw keyed",
}
