"""A committer of a database says what the server and the ledger prove, and no more.

The server is SQLite. It cannot prepare transactions, so the test holds those that are prepared.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.failing_once import Calls
from tests.unit.sinks.sql_committer_kit import SINK_ID, LossySession, Preparing, Target
from typing_extensions import override

from onceflow.clients.sql.session import (
    AccessDenied,
    DuplicateKey,
    LockTimeout,
    ReadOnly,
    Session,
    StatementRefused,
)
from onceflow.clients.sqlite import connection
from onceflow.core.errors import CommitOutcomeUnknown, SinkError
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    Committable,
    Committed,
    Lost,
    RetryLater,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.sinks.base.checks import FenceOwner
from onceflow.sinks.sql import ledger as ledgers
from onceflow.sinks.sql.committer import SqlCommitter
from onceflow.sinks.sql.ledger import Ledger
from onceflow.sinks.sql.settings import CommitMode
from onceflow.sinks.sqlite.sink import SQLiteDialect


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(connection, "SQLiteSession", LossySession)
    return Target(tmp_path / "rows.db", Calls())


def name(checkpoint: int, *, attempt: int = 1, subtask: int = 0) -> TransactionId:
    return TransactionId(SINK_ID, attempt, checkpoint, subtask)


def prepare(
    target: Target, monkeypatch: pytest.MonkeyPatch, kind: type[Preparing], *checkpoints: int
) -> Preparing:
    """Let the server prepare transactions, of `checkpoints` first."""
    server = kind(target.write)
    monkeypatch.setattr(SQLiteDialect, "two_phase", server.find)
    server.prepared.update(map(name, checkpoints))
    return server


def prove(target: Target, *transactions: TransactionId) -> None:
    """Write ledger rows as a commit elsewhere does."""
    for named in transactions:
        target.write(
            "INSERT INTO onceflow_ledger"
            " (transaction_id, sink_id, attempt, checkpoint, subtask, row_count) VALUES"
            f" ('{named}', '{named.sink_id}', {named.attempt}, {named.checkpoint},"
            f" {named.subtask}, 1)"
        )


# --- prepared transactions ----------------------------------------------------------------------


def test_a_transaction_that_is_gone_is_committed_or_lost_as_the_ledger_says(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(target, monkeypatch, Preparing)
    prove(target, name(1))
    with closing(target.committer(1)) as committer:
        assert committer.commit(Committable(name(1))) == AlreadyCommitted()
        assert committer.abort(Committable(name(1))) == AlreadyCommitted()
        lost = committer.commit(Committable(name(2)))
        assert isinstance(lost, Lost)
        assert "prepared transaction job.rows/1/2/0/0 of checkpoint 2 is gone" in lost.reason
        assert committer.abort(Committable(name(2))) == Aborted()


class Held(Preparing):
    """A session holds each transaction for so many looks."""

    looks = 0
    ended = 0

    @override
    def is_held(self, session: Session, transaction: TransactionId) -> bool:
        self.looks -= 1
        return self.looks >= 0

    @override
    def end_holding_session(self, session: Session, transaction: TransactionId) -> str:
        self.ended += 1
        return "session 7 holds it"


@pytest.mark.parametrize("ends", ["commit", "abort"])
def test_a_session_that_holds_a_transaction_is_waited_for_and_then_ended(
    target: Target, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    server = prepare(target, monkeypatch, Held, 1)
    assert isinstance(server, Held)
    monkeypatch.setattr(Held, "holder_leaves_s", 60.0)
    with closing(target.committer(1)) as committer:
        end = committer.commit if ends == "commit" else committer.abort
        server.looks = 3
        assert end(Committable(name(1))) == (Committed() if ends == "commit" else Aborted())
        assert server.ended == 0
        monkeypatch.setattr(Held, "holder_leaves_s", 0.0)
        server.prepared.add(name(2))
        server.looks = 1
        assert end(Committable(name(2))) == RetryLater("session 7 holds it")
        assert server.ended == 1
        assert server.prepared == {name(2)}
    assert target.ids() == ([1] if ends == "commit" else [])


class Pretending(Preparing):
    """Answers OK to commits and commits nothing, until it is repaired."""

    is_broken = True

    @override
    def commit_is_proof(self, session: Session) -> bool:
        return False

    @override
    def _end(self, transaction: TransactionId, *, commits: bool) -> None:
        if not self.is_broken:
            super()._end(transaction, commits=commits)


def test_a_commit_whose_reply_is_no_proof_counts_by_the_ledger_alone(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = prepare(target, monkeypatch, Pretending, 1)
    assert isinstance(server, Pretending)
    with closing(target.committer(1)) as committer:
        outcome = committer.commit(Committable(name(1)))
        assert isinstance(outcome, RetryLater)
        assert "but committed nothing" in outcome.reason
        # It may vanish from the list until the server restarts, and is not lost.
        server.is_broken = False
        server.prepared.clear()
        outcome = committer.commit(Committable(name(1)))
        assert isinstance(outcome, RetryLater)
        assert "but committed nothing" in outcome.reason
        server.prepared.add(name(1))
        assert committer.commit(Committable(name(1))) == Committed()
    assert target.ids() == [1]


class Refusing(Preparing):
    """Refuses to end transactions."""

    @override
    def _end(self, transaction: TransactionId, *, commits: bool) -> None:
        raise StatementRefused("another session is deciding it")


def test_a_refused_commit_or_rollback_is_tried_again_later(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(target, monkeypatch, Refusing, 1)
    with closing(target.committer(1)) as committer:
        outcome = committer.commit(Committable(name(1)))
        assert outcome == RetryLater(
            "COMMIT PREPARED job.rows/1/1/0/0: another session is deciding it"
        )
        aborted = committer.abort(Committable(name(1)))
        assert aborted == RetryLater(
            "ROLLBACK PREPARED job.rows/1/1/0/0: another session is deciding it"
        )


class Deciding(Preparing):
    """Does not know the name while another session decides, and lists it all the same."""

    looks = 3

    @override
    def _end(self, transaction: TransactionId, *, commits: bool) -> None:
        self.looks -= 1
        if self.looks == 0:
            super()._end(transaction, commits=True)
        super()._end(replace(transaction, checkpoint=99), commits=commits)


@pytest.mark.parametrize("ends", ["commit", "abort"])
def test_a_transaction_that_is_listed_though_its_name_is_unknown_is_asked_for_again(
    target: Target, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    prepare(target, monkeypatch, Deciding, 1)
    monkeypatch.setattr(Deciding, "holder_leaves_s", 60.0)
    with closing(target.committer(1)) as committer:
        end = committer.commit if ends == "commit" else committer.abort
        assert end(Committable(name(1))) == AlreadyCommitted()
    assert target.ids() == [1]


class Dated(Preparing):
    """Prepares everything at one time."""

    @override
    def find_prepare_time(self, session: Session, transaction: TransactionId) -> datetime | None:
        return datetime(2026, 1, 2) if transaction in self.prepared else None


def test_the_time_of_a_prepared_transaction_is_told(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(target.committer(1)) as committer:
        assert committer.find_prepare_time(Committable(name(1))) is None
    prepare(target, monkeypatch, Dated, 1)
    with closing(target.committer(1)) as committer:
        assert committer.find_prepare_time(Committable(name(1))) == datetime(2026, 1, 2)
        assert committer.find_prepare_time(Committable(name(2))) is None


def test_a_database_without_prepared_transactions_leaves_them_to_their_sink(
    target: Target,
) -> None:
    with closing(target.committer(1)) as committer:
        for outcome in (
            committer.commit(Committable(name(1))),
            committer.abort(Committable(name(1))),
        ):
            assert isinstance(outcome, RetryLater)
            assert "it belongs to another sink" in outcome.reason


# --- a target that was set back -----------------------------------------------------------------


def test_a_committer_that_is_led_to_an_older_copy_of_the_database_says_so(target: Target) -> None:
    first, second, third = (target.stage(checkpoint) for checkpoint in (1, 2, 3))
    committer = target.committer(1)
    assert committer.commit(first) == Committed()
    target.write(f"DELETE FROM onceflow_ledger WHERE checkpoint = {1}")
    # On the same connection it is the same database.
    assert committer.commit(second) == Committed()
    target.write("DELETE FROM onceflow_ledger")
    LossySession.calls = Calls(1)
    with pytest.raises(CommitOutcomeUnknown, match=r"job.rows/1/2/0/0 was committed at .* older"):
        committer.commit(third)
    committer.close()


def test_a_new_connection_to_the_same_database_is_not_asked_about(target: Target) -> None:
    committer = target.committer(1)
    for checkpoint in (1, 2, 3):
        committable = target.stage(checkpoint)
        LossySession.calls = Calls(1)
        assert committer.commit(committable) == Committed()
    assert target.ids() == [1, 2, 3]
    committer.close()


# --- what is in doubt ---------------------------------------------------------------------------


class Secret(Preparing):
    """Lists nothing for this user."""

    error: Exception = AccessDenied("permission denied")

    @override
    def list_prepared(self, session: Session, sink_id: str) -> tuple[TransactionId, ...]:
        raise self.error


def test_both_prepared_and_staged_transactions_are_in_doubt(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(target, monkeypatch, Preparing, 1)
    staged = target.stage(2)
    with closing(target.committer(1)) as committer:
        assert list(committer.in_doubt()) == [Committable(name(1)), replace(staged, rows=0)]


@pytest.mark.parametrize("mode", ["ledger", "two_phase", "auto", "unknown", "unread"])
def test_a_list_that_may_not_be_read_is_done_without_in_ledger_mode_alone(
    target: Target, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    server = prepare(target, monkeypatch, Secret)
    assert isinstance(server, Secret)
    staged = target.stage(1)
    settings = target.sink.settings
    if mode in ("auto", "unknown", "unread"):
        settings = replace(settings, commit_mode=None)
        if mode == "unknown":
            target.write("UPDATE onceflow_sinks SET commit_mode = 'two_phase'")
        if mode == "unread":
            target.write("ALTER TABLE onceflow_sinks RENAME TO hidden")
    elif mode == "two_phase":
        settings = replace(settings, commit_mode=CommitMode.TWO_PHASE)
    with closing(SqlCommitter(settings, target.context(1))) as committer:
        if mode in ("ledger", "auto"):
            assert list(committer.in_doubt()) == [replace(staged, rows=0)]
            server.error = LockTimeout("busy")
        with pytest.raises(SinkError, match="cannot list its transactions in doubt"):
            committer.in_doubt()


# --- staged rows --------------------------------------------------------------------------------


def test_staged_rows_that_are_gone_are_lost_unless_a_newer_attempt_may_have_committed_them(
    target: Target,
) -> None:
    committable = target.stage(1)
    target.sound_area.discard(committable.transaction)
    with closing(target.committer(1)) as committer:
        assert isinstance(committer.commit(committable), Lost)
        target.sink.open(target.context(2), pa.schema([pa.field("id", pa.int64(), nullable=False)]))
        outcome = committer.commit(committable)
        assert isinstance(outcome, RetryLater)
        assert "attempt 2 has taken over from 1" in outcome.reason
    with closing(target.committer(2)) as committer:
        assert isinstance(committer.commit(committable), Lost)
    assert target.proofs() == 0


def test_an_abort_leaves_no_proof_and_deletes_no_committed_row(target: Target) -> None:
    committed, undecided = target.stage(1), target.stage(2)
    with closing(target.committer(1)) as committer:
        assert committer.commit(committed) == Committed()
        assert target.sound_area.transactions() == [undecided.transaction]
        committed = target.stage(1)
        assert committer.abort(committed) == AlreadyCommitted()
        assert committer.abort(undecided) == Aborted()
        assert target.sound_area.transactions() == []
        assert target.proofs() == 1
        assert isinstance(committer.commit(undecided), Lost)
    assert target.ids() == [1]


def test_rows_that_the_table_refuses_wait_for_a_person_and_are_committed_when_it_takes_them(
    target: Target,
) -> None:
    committable = target.stage(1)
    target.sink = replace(target.sink, create=False)
    target.write("ALTER TABLE rows RENAME TO hidden")
    with closing(target.committer(1)) as committer:
        outcome = committer.commit(committable)
        assert isinstance(outcome, RetryLater)
        assert outcome.until_fixed
        assert "table rows does not exist" in outcome.reason
        assert target.proofs() == 0
        target.write("ALTER TABLE hidden RENAME TO rows")
        target.write("CREATE UNIQUE INDEX one ON rows (id); INSERT INTO rows VALUES (1)")
        outcome = committer.commit(committable)
        assert isinstance(outcome, RetryLater)
        assert outcome.until_fixed
        target.write("DELETE FROM rows")
        assert committer.commit(committable) == Committed()
        assert committer.commit(committable) == AlreadyCommitted()
    assert target.ids() == [1]


def test_a_dropped_table_is_created_again_in_the_transaction_of_its_rows(target: Target) -> None:
    committable = target.stage(1)
    target.write("DROP TABLE rows")
    with closing(target.committer(1)) as committer:
        assert committer.commit(committable) == Committed()
    assert target.ids() == [1]


def test_rows_are_matched_to_the_table_anew_after_it_has_refused_them(target: Target) -> None:
    first, second = target.stage(1), target.stage(2)
    with closing(target.committer(1)) as committer:
        assert committer.commit(first) == Committed()
        target.write("ALTER TABLE rows RENAME TO hidden")
        target.write("CREATE TABLE rows (other INTEGER)")
        assert isinstance(committer.commit(second), RetryLater)
        target.write("DROP TABLE rows")
        target.write("CREATE TABLE rows (id TEXT NOT NULL)")
        outcome = committer.commit(second)
    assert isinstance(outcome, RetryLater), "text is no column for whole numbers"
    assert target.ids() == []


def test_staged_rows_that_join_a_callers_transaction_are_there_once(target: Target) -> None:
    committable, gone = target.stage(1), target.stage(2)
    target.sound_area.discard(gone.transaction)
    with closing(target.committer(1)) as committer:
        assert isinstance(committer, SqlCommitter)
        staged = committer._staged  # pyright: ignore[reportPrivateUsage]
        session = target.sink.endpoint.connect("caller")
        with pytest.raises(SinkError, match="finds nothing staged under this name"):
            staged.apply(session, gone)
        with session.transaction():
            staged.apply(session, committable)
        with pytest.raises(SinkError, match="is in the ledger, so its rows are committed"):
            staged.apply(session, committable)
        session.close()
        assert committer.commit(committable) == AlreadyCommitted()
    assert target.ids() == [1]
    assert target.sound_area.transactions() == []


class ReadOnlyOnce(Preparing):
    """The first session may not write; the next one may."""

    sessions: list[Session]

    @override
    def commit(self, session: Session, transaction: TransactionId) -> None:
        if not self.sessions:
            self.sessions.append(session)
        if session in self.sessions:
            super().commit(session, replace(transaction, checkpoint=99))
        super().commit(session, transaction)

    @override
    def is_prepared(self, session: Session, transaction: TransactionId) -> bool:
        raise ReadOnly("the server is a standby now")


def test_a_server_that_became_read_only_is_asked_on_a_new_connection(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = prepare(target, monkeypatch, ReadOnlyOnce, 1)
    assert isinstance(server, ReadOnlyOnce)
    server.sessions = []
    with closing(target.committer(1)) as committer:
        outcome = committer.commit(Committable(name(1)))
        assert isinstance(outcome, RetryLater)
        assert not outcome.until_fixed
        assert committer.commit(Committable(name(1))) == Committed()


# --- the ledger ---------------------------------------------------------------------------------


@pytest.fixture
def ledger(target: Target) -> Ledger:
    return target.sink.settings.ledger


@pytest.fixture
def session(target: Target) -> Session:
    return target.sink.endpoint.connect("ledger")


def test_a_ledger_row_is_written_by_the_newest_attempt_alone(
    target: Target, ledger: Ledger, session: Session
) -> None:
    assert ledger.record(session, name(1), 5)
    assert ledger.has(session, name(1))
    with pytest.raises(DuplicateKey):
        ledger.record(session, name(1), 5)
    assert ledger.claim(session, SINK_ID, "job", FenceOwner("log", AttemptId(3)), "ledger")
    assert not ledger.record(session, name(2, attempt=2), 5)
    assert ledger.record(session, name(2, attempt=3), 5)
    assert not ledger.record(session, TransactionId("other", 3, 1, 0), 5)
    assert not ledger.has(session, name(2, attempt=2))
    session.close()


@pytest.mark.parametrize(
    ("log", "attempt", "is_claimed"),
    [("log", 1, False), ("log", 2, True), ("log", 0, False), ("another", 9, False)],
)
def test_a_claim_goes_to_a_newer_attempt_of_the_same_log_alone(
    ledger: Ledger, session: Session, log: str, attempt: int, is_claimed: bool
) -> None:
    claimant = FenceOwner(log, AttemptId(attempt), "renamed")
    assert ledger.claim(session, SINK_ID, "renamed", claimant, "two_phase") == is_claimed
    owner = ledger.owner(session, SINK_ID)
    assert owner == (claimant if is_claimed else FenceOwner("log", AttemptId(1), "job"))
    expected = "two_phase" if is_claimed else "ledger"
    assert ledger.commit_mode(session, SINK_ID) == expected
    assert ledger.owner(session, "other") is None
    assert ledger.commit_mode(session, "other") is None
    session.close()


def test_the_newest_claim_is_shown_to_people(
    target: Target, ledger: Ledger, session: Session
) -> None:
    target.write("UPDATE onceflow_sinks SET attempt = 7, claimed_at = '2026-01-02'")
    assert ledger.newest_claim(session, SINK_ID) == (7, "job", "2026-01-02")
    assert ledger.newest_claim(session, "other") is None
    session.close()


def test_a_row_that_another_session_has_written_first_is_not_written(
    target: Target, ledger: Ledger, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SQLiteDialect, "unless_there", "")
    prove(target, name(1))
    assert not ledger.record_applied(session, name(1), 1)
    assert ledger.record_applied(session, name(2), 1)
    other = FenceOwner("another", AttemptId(9), "job")
    assert not ledger.claim(session, SINK_ID, "job", other, "ledger")
    session.close()


def test_proofs_are_pruned_by_whole_checkpoints_of_one_sink(
    target: Target, ledger: Ledger, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "_PRUNED_AT_ONCE", 3)
    mine = [name(checkpoint, subtask=s) for checkpoint in (1, 2, 3, 4) for s in (0, 1)]
    other = TransactionId("other", 1, 1, 0)
    prove(target, *mine, other)

    def left() -> list[tuple[int, int]]:
        rows = session.query("SELECT checkpoint, count(*) FROM onceflow_ledger GROUP BY sink_id, 1")
        return sorted((int(checkpoint), int(count)) for checkpoint, count in rows)

    assert ledger.prune(session, SINK_ID, CheckpointId(4))
    assert left() == [(1, 1), (2, 2), (3, 2), (4, 2)]
    assert ledger.prune(session, SINK_ID, CheckpointId(4))
    assert left() == [(1, 1), (3, 2), (4, 2)]
    assert not ledger.prune(session, SINK_ID, CheckpointId(4))
    assert left() == [(1, 1), (4, 2)]
    assert not ledger.prune(session, SINK_ID, CheckpointId(4))
    assert ledger.has(session, other)
    session.close()


def test_a_large_checkpoint_is_pruned_as_a_whole(
    target: Target, ledger: Ledger, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "_PRUNED_AT_ONCE", 3)
    prove(target, *(name(1, subtask=subtask) for subtask in range(5)), name(2))
    assert ledger.prune(session, SINK_ID, CheckpointId(3))
    assert target.proofs() == 1
    session.close()


def test_a_committer_prunes_until_nothing_older_is_left(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "_PRUNED_AT_ONCE", 2)
    prove(target, *(name(checkpoint) for checkpoint in range(1, 10)))
    with closing(target.committer(1)) as committer:
        committer.prune(CheckpointId(9))
    assert target.proofs() == 1


def test_the_record_of_a_target_has_the_proofs_of_whole_checkpoints_alone(
    target: Target, ledger: Ledger, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs = [name(1), name(1, subtask=1), name(2, attempt=2), name(2, attempt=2, subtask=1)]
    prove(target, *proofs, TransactionId("other", 7, 7, 0))
    record = ledger.read_record(session, SINK_ID, 2)
    assert record.attempt == 2
    assert [(mark.attempt, mark.checkpoint) for mark in record.committed] == [(1, 1), (2, 2)]
    assert record.proofs == frozenset(proofs)
    monkeypatch.setattr(ledgers, "_PROOFS_MAX", 3)
    record = ledger.read_record(session, SINK_ID, 2)
    assert record.proofs == frozenset(proofs[2:]), "half of a checkpoint looks like a loss"
    assert [(mark.attempt, mark.checkpoint) for mark in record.committed] == [(1, 1), (2, 2)]
    session.close()


def test_the_statements_that_take_a_sink_id_over_delete_its_rows_alone(
    target: Target, ledger: Ledger, session: Session
) -> None:
    prove(target, name(1), TransactionId("other", 1, 1, 0))
    assert list(ledger.owners(session)) == [SINK_ID]
    with closing(sqlite3.connect(target.path)) as server:
        server.executescript(ledger.take_over(SINK_ID))
    assert ledger.owners(session) == {}
    assert not ledger.has(session, name(1))
    assert ledger.has(session, TransactionId("other", 1, 1, 0))
    session.close()
