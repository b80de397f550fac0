"""A sink pre-commits at each barrier, and its counters say what is visible and what waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from tests.support.directory_sink import DirectorySink

from onceflow.core.errors import ConfigError
from onceflow.core.plan.graph import Feed
from onceflow.core.plan.work import WriteTo
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.sink_operator import SinkMetricGroup, SinkOperator
from onceflow.core.spi import RejectedRows, SinkWriter, WriterContext
from onceflow.core.spi.dead_letters import DEAD_LETTERS, DEAD_LETTERS_TAG

_CONTEXT = WriterContext(
    job="job", uid="ledger", sink_id="out", subtask=1, parallelism=2, attempt=AttemptId(3),
    first_checkpoint=CheckpointId(1),
)  # fmt: skip
_ROWS = pa.record_batch([[1, 2]], names=["id"])


def _tx(
    checkpoint: int, *, sink: str = "out", attempt: int = 3, subtask: int = 1, sequence: int = 0
) -> Committable:
    return Committable(TransactionId(sink, attempt, checkpoint, subtask, sequence), rows=5)


class _Commits:
    """A queue that lists every transaction again."""

    def __init__(self) -> None:
        self.metrics = SinkMetricGroup("ledger", "out", 1, "the database")
        self.calls: list[object] = []
        self._listed: tuple[Committable, ...] = (_tx(0),)

    def await_commits(self) -> None:
        self.calls.append("await")

    def record_pre_commit(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> tuple[Committable, ...]:
        self.calls.append(checkpoint)
        self._listed += tuple(committables)
        return self._listed

    def record_abort(self, checkpoint: CheckpointId) -> None:
        self.calls.append(f"abort {checkpoint}")


class _Writer(SinkWriter):
    def __init__(self, *committables: Committable) -> None:
        self.committables = committables
        self.rejected: list[RejectedRows] = []
        self.calls: list[object] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self.calls.append(batch)

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        self.calls.append(checkpoint)
        return self.committables

    def take_rejected(self) -> Sequence[RejectedRows]:
        taken, self.rejected = self.rejected, []
        return taken

    def close(self) -> None:
        self.calls.append("close")


def _operator(
    writer: SinkWriter,
    commits: _Commits | None = None,
    *,
    takes_dead_letters: bool = False,
    attempt: int = _CONTEXT.attempt,
) -> SinkOperator:
    sink = DirectorySink("nowhere")
    work = WriteTo(sink, "out", takes_dead_letters=takes_dead_letters)
    context = replace(_CONTEXT, attempt=AttemptId(attempt))
    return SinkOperator("ledger", work, writer, commits or _Commits(), context)


def _upload(operator: SinkOperator, checkpoint: int) -> tuple[Committable, ...]:
    no_storage: Any = None
    return operator.snapshot(CheckpointId(checkpoint)).upload(no_storage).committables


def test_an_ack_lists_all_that_is_not_known_to_be_committed() -> None:
    commits, writer = _Commits(), _Writer(_tx(2))
    operator = _operator(writer, commits)
    operator.receive(Batch(_ROWS))
    assert commits.metrics.read().open == 1
    assert _upload(operator, 2) == (_tx(0), _tx(2))
    assert writer.calls == [_ROWS, 2]
    assert commits.calls == ["await", 2]
    operator.on_aborted(CheckpointId(2))
    operator.close()
    assert (commits.calls[-1], writer.calls[-1]) == ("abort 2", "close")


@pytest.mark.parametrize("named", [_tx(2, sink="other"), _tx(2, subtask=0)])
def test_a_transaction_with_the_name_of_another_subtask_is_committed_never(
    named: Committable,
) -> None:
    commits = _Commits()
    with pytest.raises(ConfigError, match=r"returned transaction .* must be named out/3/2/1/0"):
        _upload(_operator(_Writer(named), commits), 2)
    assert commits.calls == ["await"]


def test_a_checkpoint_may_have_several_transactions_and_names_of_earlier_ones() -> None:
    operator = _operator(_Writer(_tx(1), _tx(2, sequence=1)))
    assert _upload(operator, 2)[1:] == (_tx(1), _tx(2, sequence=1))


def test_a_sink_of_dead_letters_says_that_it_takes_them() -> None:
    for takes in (False, True):
        assert _operator(_Writer(), takes_dead_letters=takes).takes_dead_letters == takes


@pytest.mark.parametrize("by", ["write", "pre-commit"])
def test_rows_that_a_writer_leaves_out_are_dead_letters_of_the_same_checkpoint(
    by: str, caplog: pytest.LogCaptureFixture
) -> None:
    commits, writer = _Commits(), _Writer()
    operator = _operator(writer, commits)
    letters: list[Batch] = []
    operator.outlet(Feed("ledger", DEAD_LETTERS, DEAD_LETTERS_TAG)).append(letters.append)
    with caplog.at_level(logging.WARNING):
        for number in range(1, 12):
            writer.rejected = [RejectedRows(_ROWS.slice(0, 1), [f"too long {number}"])]
            if by == "write":
                operator.receive(Batch(_ROWS))
            else:
                operator.snapshot(CheckpointId(number))
            assert len(letters) == number
    assert [letter.rows.column("reason").to_pylist() for letter in letters[:2]] == [
        ["too long 1"],
        ["too long 2"],
    ]
    assert commits.metrics.read().rows_rejected == 11
    # At 1, 10, 100 …
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "too long 1",
        "too long 10",
    ]


def test_counters_follow_rows_from_open_over_prepared_to_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    metrics = SinkMetricGroup("ledger", "out", 1)
    assert (metrics.read().open, metrics.read().prepared) == (0, 0)
    assert not metrics.read().commit_stuck
    metrics.note_written()
    assert metrics.read().open == 1
    metrics.pre_committed([_tx(1), _tx(1, sequence=1)])
    now_s = 102.0
    metrics.pre_committed([_tx(2)])
    now_s = 103.00049
    before = metrics.read()
    assert (before.open, before.prepared, before.oldest_prepared_s) == (0, 3, 3.0)
    now_s = 103.0
    metrics.note_decided(CheckpointId(1))
    now_s = 103.5
    metrics.note_decided(CheckpointId(1))
    metrics.note_retry("it is read-only", is_stuck=True)
    refused = metrics.read()
    assert (refused.retried, refused.commit_refusal, refused.commit_stuck) == (
        1,
        "it is read-only",
        True,
    )
    now_s = 104.00012345
    metrics.note_committed(_tx(1))
    metrics.note_committed(_tx(1, sequence=1))
    done = metrics.read()
    assert (done.prepared, done.committed, done.rows_committed) == (1, 2, 10)
    assert (done.last_commit_ms, done.oldest_prepared_s) == (1000.123, 2.0)
    assert (done.commit_refusal, done.commit_stuck) == ("", False)
    # Checkpoint 2 is not decided yet: it would not have waited.
    metrics.note_committed(_tx(2))
    left = metrics.read()
    assert (left.last_commit_ms, left.prepared, left.oldest_prepared_s) == (0.0, 0, 0.0)
    assert (left.uid, left.sink_id, left.subtask) == ("ledger", "out", 1)


def test_a_call_to_the_target_that_lasts_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    class _Slow(_Writer):
        def write(self, batch: pa.RecordBatch) -> None:
            nonlocal now_s
            now_s += 10
            waits.extend(operator.list_waits())

        def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
            nonlocal now_s
            now_s += 20
            waits.extend(operator.list_waits())
            return ()

    waits: list[Any] = []
    operator = _operator(_Slow())
    operator.receive(Batch(_ROWS))
    operator.snapshot(CheckpointId(1))
    assert [(wait.what, wait.waited_s, wait.call) for wait in waits] == [
        ("the database", 10.0, "write"),
        ("the database", 20.0, "pre-commit"),
    ]
    assert operator.list_waits() == ()


def test_a_refusal_after_decided_rows_counts_for_this_attempt_alone() -> None:
    class _Refusing(_Writer):
        def write(self, batch: pa.RecordBatch) -> None:
            raise ValueError("too long")

    def refuse(operator: SinkOperator) -> str:
        with pytest.raises(Exception, match="rows were not written: ValueError: too long") as told:
            operator.receive(Batch(_ROWS))
        fingerprint: str = getattr(told.value, "fingerprint")  # noqa: B009
        return fingerprint

    operators = [
        _operator(_Refusing(_tx(2, attempt=attempt)), attempt=attempt) for attempt in range(3, 7)
    ]
    for operator in operators[1:]:
        operator.snapshot(CheckpointId(2))
    for operator in operators[2:]:
        operator.on_completed(CheckpointId(2))
    first, undecided, *decided = map(refuse, operators)
    assert first == undecided, "the same mistake in each attempt"
    assert len({first, *decided}) == 3
