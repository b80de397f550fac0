"""The sink of the examples: how long it is, what it does as a program, and what it refuses."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from examples.own_sink import OwnSink

from onceflow.core.errors import BadRow, ConfigError, Fenced, SinkError
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    Committable,
    Committed,
    Lost,
    RetryLater,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi import Committer, CommitterContext, OnBadRow, SinkWriter, WriterContext
from onceflow.core.storage.staging.staged_rows import FileStagingArea

_ROOT = Path(__file__).parents[2]
_SCHEMA = pa.schema([pa.field("key", pa.string()), pa.field("value", pa.int64())])


class _Job:
    """The sink over a file, with rows staged in a directory."""

    def __init__(self, directory: Path, log_id: str = "log-1") -> None:
        self.path = directory / "target.db"
        self.sink = OwnSink(str(self.path), table="odd \u00fc table", key="key")
        self.staging = FileStagingArea.in_directory(str(directory / "staging"), "job.sqlite")
        self.log_id = log_id

    def context(self, attempt: int = 1) -> CommitterContext:
        return CommitterContext(
            "job", "sqlite", "job.sqlite", AttemptId(attempt), self.log_id, self.staging
        )

    def check(self, attempt: int = 1) -> _Job:
        self.sink.open(self.context(attempt), _SCHEMA)
        return self

    def writer(self, on_bad_row: OnBadRow = OnBadRow.FAIL) -> SinkWriter:
        return self.sink.writer(
            WriterContext(
                job="job",
                uid="sqlite",
                sink_id="job.sqlite",
                subtask=0,
                parallelism=1,
                attempt=AttemptId(1),
                first_checkpoint=CheckpointId(1),
                schema=_SCHEMA,
                staging=self.staging,
                on_bad_row=on_bad_row,
            )
        )

    def committer(self) -> Committer:
        return self.sink.committer(self.context())

    def prepare(self, checkpoint: int, rows: Sequence[tuple[str | None, int]]) -> Committable:
        writer = self.writer()
        writer.write(_batch(rows))
        (committable,) = writer.pre_commit(CheckpointId(checkpoint))
        writer.close()
        return committable

    def rows(self) -> dict[str, int]:
        with closing(sqlite3.connect(self.path)) as db:
            return dict(db.execute('SELECT key, value FROM "odd \u00fc table"').fetchall())


def _batch(rows: Sequence[tuple[str | None, int]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"key": k, "value": v} for k, v in rows], _SCHEMA)


@pytest.fixture
def job(tmp_path: Path) -> _Job:
    return _Job(tmp_path).check()


def test_the_whole_sink_is_under_a_hundred_lines() -> None:
    """Blank lines, imports and docstrings included."""
    assert len((_ROOT / "examples/own_sink.py").read_text().splitlines()) < 100


@pytest.mark.spark
@pytest.mark.slow  # tests/conformance kills the same sink
def test_program_kills_slots_and_proves_the_table(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(_ROOT / "examples/own_sink.py")],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(_ROOT / "src"), "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kill -9") == 2
    assert "finished after 2 restores" in done.stdout
    assert "30000 payments counted of 30000" in done.stdout
    assert "50 accounts of 50, 0 with a wrong balance" in done.stdout


def test_newest_row_of_each_key_is_kept_and_nothing_is_seen_early(job: _Job) -> None:
    first = job.prepare(1, [("a", 1), ("b", 1), ("a", 2)])
    second = job.prepare(2, [("b", 3)])
    assert job.rows() == {}
    committer = job.committer()
    assert [str(one.transaction) for one in committer.in_doubt()] == [
        "job.sqlite/1/1/0/0",
        "job.sqlite/1/2/0/0",
    ]
    assert committer.commit(first) == Committed()
    assert job.rows() == {"a": 2, "b": 1}
    assert committer.commit(second) == Committed()
    assert committer.commit(first) == AlreadyCommitted()
    assert job.rows() == {"a": 2, "b": 3}
    assert list(committer.in_doubt()) == []
    assert job.staging.transactions() == []


def test_committer_that_died_after_its_commit_is_not_repeated(job: _Job) -> None:
    committable = job.prepare(1, [("a", 1)])
    transaction = committable.transaction
    assert job.sink.apply(transaction, iter([_batch([("a", 1)])]))
    # It died before it discarded what was staged.
    committer = job.committer()
    assert list(committer.in_doubt()) == []
    job.prepare(2, [("a", 2)])
    with closing(sqlite3.connect(job.path)) as db, db:
        db.execute('UPDATE "odd \u00fc table" SET value = 7')
    assert committer.commit(committable) == AlreadyCommitted()
    assert committer.abort(committable) == AlreadyCommitted()
    assert job.rows() == {"a": 7}


def test_pruning_discards_what_was_left_staged_before_it_forgets_the_proof(job: _Job) -> None:
    committable = job.prepare(1, [("a", 1)])
    job.sink.apply(committable.transaction, iter([_batch([("a", 1)])]))
    pending = job.prepare(2, [("b", 1)])
    committer = job.committer()
    committer.prune(CheckpointId(5))
    assert job.staging.transactions() == [pending.transaction], "in doubt, however old"
    assert not job.sink.is_applied(committable.transaction)


@pytest.mark.parametrize("reads_first", [False, True], ids=["before-reading", "after-reading"])
def test_committer_that_was_overtaken_and_whose_proof_is_pruned_changes_nothing(
    job: _Job, *, reads_first: bool
) -> None:
    first, second = job.prepare(1, [("a", 1)]), job.prepare(2, [("a", 2)])

    @dataclass(frozen=True)
    class HeldUp(OwnSink):
        """Another committer commits everything, and prunes, before this one applies."""

        def apply(self, transaction: TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
            taken = iter(list(rows)) if reads_first else rows
            other = job.committer()
            assert [other.commit(first), other.commit(second)] == [Committed(), Committed()]
            other.prune(CheckpointId(2))
            return super().apply(transaction, taken)

    held_up = HeldUp(job.sink.path, job.sink.table, job.sink.key).committer(job.context())
    assert held_up.commit(first) == AlreadyCommitted()
    assert job.rows() == {"a": 2}
    assert job.sink.is_applied(second.transaction), "its proof is asked for still"


def test_rows_are_gone_for_who_asks_in_the_targets_transaction_also_without_a_floor(
    job: _Job,
) -> None:
    first, second = job.prepare(1, [("a", 1)]), job.prepare(2, [("a", 2)])

    @dataclass(frozen=True)
    class WithoutFloor(OwnSink):
        """Is overtaken before it applies, and its proof is deleted and nothing stored."""

        def apply(self, transaction: TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
            other = job.committer()
            assert [other.commit(first), other.commit(second)] == [Committed(), Committed()]
            with closing(sqlite3.connect(job.path)) as db, db:
                db.execute("DELETE FROM ledger WHERE checkpoint_id < 2")
            return super().apply(transaction, rows)

    overtaken = WithoutFloor(job.sink.path, job.sink.table, job.sink.key).committer(job.context())
    assert isinstance(overtaken.commit(first), Lost)
    assert job.rows() == {"a": 2}
    assert not job.sink.is_applied(first.transaction), "a proof without rows"


def test_floor_never_falls_when_an_older_committer_prunes_late(job: _Job) -> None:
    todo = [job.prepare(checkpoint, [("a", checkpoint)]) for checkpoint in (1, 2, 3)]
    committer = job.committer()
    assert [committer.commit(one) for one in todo] == [Committed()] * 3
    committer.prune(CheckpointId(3))
    committer.prune(CheckpointId(2))
    assert not job.sink.apply(todo[1].transaction, iter([_batch([("a", 2)])]))
    assert job.rows() == {"a": 3}


def test_what_is_staged_below_the_floor_is_neither_applied_nor_called_committed(job: _Job) -> None:
    """As when checkpoints are counted from 1 again, over a target that remembers more."""
    job.committer().prune(CheckpointId(9))
    committable = job.prepare(1, [("a", 1)])
    outcome = job.committer().commit(committable)
    assert isinstance(outcome, RetryLater)
    assert "checkpoint 1" in outcome.reason
    assert job.staging.contains(committable.transaction)
    assert job.rows() == {}


def test_rows_that_vanished_are_lost_and_aborted_ones_never_seen(job: _Job) -> None:
    gone, aborted = job.prepare(1, [("a", 1)]), job.prepare(2, [("b", 1)])
    job.staging.discard(gone.transaction)
    committer = job.committer()
    assert isinstance(committer.commit(gone), Lost)
    assert committer.abort(aborted) == Aborted()
    assert isinstance(committer.commit(aborted), Lost)
    assert job.rows() == {}


def test_committers_at_once_apply_each_transaction_once(job: _Job) -> None:
    todo = [job.prepare(checkpoint, [(str(checkpoint), 1)]) for checkpoint in range(1, 21)]
    outcomes: list[object] = []

    def commit() -> None:
        committer = job.committer()
        outcomes.extend(committer.commit(committable) for committable in todo)

    threads = [threading.Thread(target=commit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes.count(Committed()) == 20
    assert outcomes.count(AlreadyCommitted()) == 40
    assert len(job.rows()) == 20


def test_file_that_another_program_locks_is_waited_for_and_asked_again(
    job: _Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    committable = job.prepare(1, [("a", 1)])
    connect = sqlite3.connect

    def impatient(path: str, timeout: float) -> sqlite3.Connection:
        return connect(path, timeout=min(timeout, 0.05))

    with closing(connect(job.path)) as other:
        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(sqlite3, "connect", impatient)
        committer = job.committer()
        outcome = committer.commit(committable)
        assert isinstance(outcome, RetryLater)
        assert "locked" in outcome.reason
        assert isinstance(committer.abort(committable), RetryLater)
        with pytest.raises(SinkError, match="locked"):
            committer.in_doubt()
        other.rollback()
    assert committer.commit(committable) == Committed()


def test_other_jobs_and_older_attempts_are_refused(job: _Job, tmp_path: Path) -> None:
    for attempt in (1, 0):
        with pytest.raises(Fenced):
            job.check(attempt)
    with pytest.raises(Fenced, match="another job's"):
        _Job(tmp_path, log_id="log-2").check(9)
    job.check(2)


def test_rows_without_a_key_are_refused_while_there_is_time(job: _Job) -> None:
    with pytest.raises(BadRow, match=r"'key' is the key, and null \(row 1 of its batch\)"):
        job.writer().write(_batch([("a", 1), (None, 2)]))
    writer = job.writer(OnBadRow.DROP)
    writer.write(_batch([("a", 1), (None, 2)]))
    (rejected,) = writer.take_rejected()
    assert rejected.rows.to_pylist() == [{"key": None, "value": 2}]
    (committable,) = writer.pre_commit(CheckpointId(1))
    assert committable.rows == 1


def test_types_that_sqlite_has_not_are_refused_at_start(job: _Job) -> None:
    schema = pa.schema([pa.field("key", pa.string()), pa.field("value", pa.decimal128(5, 2))])
    with pytest.raises(ConfigError, match="cast before the sink"):
        job.sink.open(job.context(2), schema)
