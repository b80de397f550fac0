"""A commit that fails until a person changes something says so, and one that may pass does not."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest
from tests.integration.sink_kit import Job

from onceflow import connectors
from onceflow.core.protocol.committables import Committed
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import FileSink
from onceflow.sinks.files.partitions import Partitions
from onceflow.sinks.files.writer import KEY_LENGTH_MAX_BYTES, PATH_LENGTH_MAX_BYTES

SCHEMA = pa.schema([("id", pa.int64()), ("day", pa.string()), ("place", pa.string())])


def caused_by(cause: Exception) -> connectors.SinkError:
    error = connectors.SinkError("the target answered with an error")
    error.__cause__ = cause
    return error


@dataclass(frozen=True)
class FailingSink(connectors.StagedSink):
    """Fails to apply what is staged, with `error`."""

    error: Exception = field(default_factory=lambda: connectors.SinkError("no answer"))

    def claim(self, context: connectors.CommitterContext) -> None:
        pass

    def apply(self, transaction: connectors.TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
        list(rows)
        raise self.error

    def is_applied(self, transaction: connectors.TransactionId) -> bool:
        return False

    def prune(self, sink_id: str, before: connectors.CheckpointId) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (connectors.BadRow("id 7"), True),
        (connectors.TargetRefused("column id is gone"), True),
        (caused_by(ValueError("year 10000 is out of range")), True),
        (caused_by(OSError(errno.ENAMETOOLONG, "File name too long")), True),
        (connectors.SinkError("no answer"), False),
        (caused_by(ConnectionResetError("reset by peer")), False),
        (caused_by(OSError(errno.ENOSPC, "No space left on device")), False),
    ],
    ids=lambda value: type(getattr(value, "__cause__", None) or value).__name__,
)
def test_a_staged_commit_says_whether_a_person_has_to_help(
    tmp_path: Path, error: Exception, waits: bool
) -> None:
    staging = FileStagingArea.in_directory(str(tmp_path), "job.ledger")
    with Job(FailingSink(error), schema=SCHEMA, staging=staging) as job:
        committable = job.prepare(1, pa.RecordBatch.from_pylist([{"id": 1}], schema=SCHEMA))
        outcome = job.committer().commit(committable)
    assert isinstance(outcome, connectors.RetryLater)
    assert outcome.until_fixed is waits


@pytest.mark.parametrize("on_bad_row", [connectors.OnBadRow.FAIL, connectors.OnBadRow.DROP])
def test_a_path_that_is_too_long_as_a_whole_makes_a_bad_row_before_it_is_decided(
    tmp_path: Path, on_bad_row: connectors.OnBadRow
) -> None:
    """Each name is short enough, and the path of all of them together is not."""
    deep = tmp_path.joinpath(*["d" * 200] * 18)
    deep.mkdir(parents=True)
    bad, good = ({"id": n, "day": "d" * n, "place": "p" * n} for n in (240, 2))
    sink = FileSink(str(deep), partition_by=("day", "place"))
    with Job(sink, schema=SCHEMA, on_bad_row=on_bad_row) as job:
        job.check()
        writer = job.writer()
        batch = pa.RecordBatch.from_pylist([bad, good], schema=SCHEMA)
        if on_bad_row is connectors.OnBadRow.FAIL:
            with pytest.raises(
                connectors.BadRow, match="a directory of 491 bytes, and below the sink's own"
            ):
                writer.write(batch)
            return
        writer.write(batch)
        (rejected,) = writer.take_rejected()
        assert rejected.rows.to_pylist() == [bad]
        (committable,) = writer.pre_commit(connectors.CheckpointId(1))
        assert job.committer().commit(committable) == Committed()
    assert len(list(deep.rglob("*.parquet"))) == 1


def test_a_key_of_a_bucket_is_shorter_than_a_path() -> None:
    columns = [f"c{n}" for n in range(5)]
    schema = pa.schema([("id", pa.int64()), *((name, pa.string()) for name in columns)])
    partitions = Partitions(columns, schema)
    row = {"id": 1} | dict.fromkeys(columns, "v" * 200)
    rows = pa.RecordBatch.from_pylist([row, {"id": 2}], schema=schema)
    assert list(partitions.find_long_directories(rows, KEY_LENGTH_MAX_BYTES - 100)) == [0]
    assert partitions.find_long_directories(rows, PATH_LENGTH_MAX_BYTES - 100) == {}
