"""Whichever single call to storage or the server fails, each row is in the table once.

The server is SQLite, whose connection is lost at one statement. It cannot prepare transactions, so
the test holds those that are prepared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.failing_once import Calls, ask_twice, commit
from tests.unit.sinks.sql_committer_kit import SINK_ID, LossySession, Preparing, Target
from typing_extensions import override

from onceflow.clients.sql.session import Session
from onceflow.clients.sqlite import connection
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    Committable,
    Committed,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.sinks.sqlite.sink import SQLiteDialect


def run(target: Target, committables: Sequence[Committable], undecided: Committable) -> None:
    """Commit two checkpoints in a slot, and again in the recovery of the next attempt."""
    slot = target.committer(1)
    for committable in committables:
        commit(slot, committable)
    slot.close()
    driver = target.committer(2)
    assert [one.transaction for one in ask_twice(driver.in_doubt)] == [undecided.transaction]
    for committable in committables:
        commit(driver, committable)
    for _ in range(4):
        aborted = driver.abort(undecided)
        if isinstance(aborted, Aborted):
            break
        assert isinstance(aborted, RetryLater | Unknown), aborted
    assert target.ids() == [1, 2]
    # Two checkpoints complete: what the first one could not delete, the second one deletes.
    driver.prune(CheckpointId(3))
    driver.prune(CheckpointId(3))
    assert target.proofs() == 0
    assert ask_twice(driver.in_doubt) == ()
    driver.close()
    assert target.sound_area.transactions() == []


def do_not_wait(_: float) -> None:
    """Let the next try come at once."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SQLiteSession", LossySession)
    monkeypatch.setattr(time, "sleep", do_not_wait)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("which", ["storage", "server"])
def test_each_staged_row_is_there_once_whichever_call_fails_for_a_moment(
    tmp_path: Path, which: str, after: bool
) -> None:
    """No call fails in the first run, which counts the calls."""
    fails, count = 0, 0
    while fails <= count:
        failing, sound = Calls(fails, after=after), Calls()
        target = Target(tmp_path / f"{fails}.db", failing if which == "storage" else sound)
        *committables, undecided = [target.stage(checkpoint) for checkpoint in (1, 2, 3)]
        LossySession.calls = failing if which == "server" else sound
        run(target, committables, undecided)
        count = count or failing.count
        fails += 1
    assert count > 5


@pytest.mark.parametrize("after", [False, True])
def test_each_prepared_row_is_there_once_wherever_the_connection_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    fails, count = 0, 0
    while fails <= count:
        failing = Calls(fails, after=after)
        target = Target(tmp_path / f"{fails}.db", Calls())
        server = Preparing(target.write)
        monkeypatch.setattr(SQLiteDialect, "two_phase", server.find)
        names = [TransactionId(SINK_ID, 1, checkpoint, 0) for checkpoint in (1, 2, 3)]
        server.prepared.update(names)
        *committables, undecided = map(Committable, names)
        LossySession.calls = failing
        run(target, committables, undecided)
        count = count or failing.count
        fails += 1
    assert count > 5


class CommittedLate(Preparing):
    """Another session prepares and commits a transaction before it is looked for again."""

    @override
    def is_prepared(self, session: Session, transaction: TransactionId) -> bool:
        self.prepared.add(transaction)
        self._end(transaction, commits=True)
        return False


@pytest.mark.parametrize("ends", ["commit", "abort"])
def test_a_transaction_that_another_session_commits_meanwhile_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    target = Target(tmp_path / "rows.db", Calls())
    server = CommittedLate(target.write)
    monkeypatch.setattr(SQLiteDialect, "two_phase", server.find)
    committer = target.committer(1)
    transaction = Committable(TransactionId(SINK_ID, 1, 1, 0))
    outcome = committer.commit(transaction) if ends == "commit" else committer.abort(transaction)
    assert outcome == AlreadyCommitted()
    committer.close()


def test_a_new_connection_after_pruning_is_not_taken_for_an_older_copy(tmp_path: Path) -> None:
    target = Target(tmp_path / "rows.db", Calls())
    first, second = target.stage(1), target.stage(2)
    committer = target.committer(1)
    assert committer.commit(first) == Committed()
    committer.prune(CheckpointId(2))
    LossySession.calls = Calls(1)
    assert committer.commit(second) == Committed()
    assert target.ids() == [1, 2]
    committer.close()
