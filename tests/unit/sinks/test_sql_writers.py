"""A writer of a database ends a transaction with all of its rows and their proof, or with none.

The server is SQLite. It cannot prepare transactions, so the writer's are committed instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.failing_once import Calls
from tests.unit.sinks import sql_committer_kit
from tests.unit.sinks.sql_committer_kit import SCHEMA, SINK_ID, LossySession, Target
from tests.unit.sinks.sql_writer_kit import (
    Preparing,
    context,
    ids,
    refuse_multiples_of_7,
    rejected_by,
    rows_of,
    two_phase,
)
from typing_extensions import override

from onceflow.clients.sql.session import (
    ConnectionLost,
    LockTimeout,
    RowRefused,
    Session,
    StatementInvalid,
    StatementRefused,
    TableAltered,
    TableMissing,
)
from onceflow.clients.sqlite import connection
from onceflow.core.errors import (
    BadRow,
    ConfigError,
    Fenced,
    PreCommitFailed,
    SinkError,
    StorageError,
    TargetRefused,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi import OnBadRow
from onceflow.sinks.base.checks import FenceOwner
from onceflow.sinks.sql import row_loader
from onceflow.sinks.sql.ledger import Ledger
from onceflow.sinks.sql.transactions import PlainTransactions
from onceflow.sinks.sql.writer import AtLeastOnceWriter, TwoPhaseWriter
from onceflow.sinks.sqlite.sink import SQLiteDialect


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(connection, "SQLiteSession", LossySession)
    return Target(tmp_path / "rows.db", Calls())


def at_least_once(target: Target, *, flush_rows: int) -> AtLeastOnceWriter:
    settings = replace(target.sink.settings, flush_rows=flush_rows)
    transactions = PlainTransactions(lambda: settings.endpoint.connect("writer"))
    return AtLeastOnceWriter(settings, context(target), transactions)


def proofs(target: Target) -> list[tuple[str, int]]:
    return rows_of(target, "SELECT transaction_id, row_count FROM onceflow_ledger ORDER BY 1")


# --- two-phase -----------------------------------------------------------------------------------


class NamedLate(Preparing):
    """Transactions that are named when they are prepared."""

    @property
    @override
    def transaction(self) -> TransactionId:
        return self.context.transaction(self._next)


@pytest.mark.parametrize(("kind", "last"), [(Preparing, 3), (NamedLate, 5)])
def test_each_checkpoint_has_its_rows_and_their_proof_in_a_transaction_of_its_name(
    target: Target, kind: type[Preparing], last: int
) -> None:
    given, settings = context(target), target.sink.settings
    transactions = kind(lambda: settings.endpoint.connect("writer"), given)
    writer = TwoPhaseWriter(settings, given, transactions)
    with closing(writer):
        for checkpoint, numbers in ((1, (1, 2)), (2, (3,)), (5, (4, 5, 6))):
            writer.write(ids(*numbers))
            writer.write(ids())
            (committable,) = writer.pre_commit(CheckpointId(checkpoint))
            assert committable == Committable(transactions.ended[-1], len(numbers))
    names = [context(target).transaction(CheckpointId(number)) for number in (1, 2, last)]
    assert transactions.ended == names
    assert proofs(target) == [
        (str(name), rows) for name, rows in zip(names, (2, 1, 3), strict=True)
    ]
    assert target.ids() == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_without_rows_prepares_nothing(target: Target) -> None:
    writer, transactions = two_phase(target)
    with closing(writer):
        assert writer.pre_commit(CheckpointId(1)) == ()
        assert transactions.begun == []
        writer.write(ids(1))
        assert len(writer.pre_commit(CheckpointId(2))) == 1
        assert writer.pre_commit(CheckpointId(3)) == ()
    assert [str(name) for name in transactions.ended] == [f"{SINK_ID}/1/2/0/0"]


def test_a_closed_writer_leaves_none_of_its_rows_and_writes_no_more(target: Target) -> None:
    writer, _ = two_phase(target)
    writer.write(ids(1))
    writer.close()
    assert target.ids() == []
    target.write("INSERT INTO rows VALUES (9)")
    with pytest.raises(SinkError, match="rows were not written: the writer is closed"):
        writer.write(ids(2))
    with pytest.raises(PreCommitFailed, match="checkpoint 1 was not pre-committed: the writer is"):
        writer.pre_commit(CheckpointId(1))
    assert target.ids() == [9]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ConnectionLost("gone"), PreCommitFailed),
        (TableAltered("column id was altered"), PreCommitFailed),
        (StorageError("full"), PreCommitFailed),
        (SinkError("the name is in use"), PreCommitFailed),
        (StatementInvalid("no such column"), TargetRefused),
        (TableMissing("no such table"), TargetRefused),
        (RowRefused("a trigger"), BadRow),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_pre_commit_that_fails_ends_the_writer_and_its_rows(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    raised: type[BaseException],
) -> None:
    def fail(_: Preparing) -> None:
        raise error

    monkeypatch.setattr(Preparing, "prepare", fail)
    writer, _ = two_phase(target)
    writer.write(ids(1))
    with pytest.raises(raised) as caught:
        writer.pre_commit(CheckpointId(1))
    assert type(caught.value) is raised
    target.write("INSERT INTO rows VALUES (9)")
    with pytest.raises(SinkError, match="the writer is closed, or has failed before"):
        writer.write(ids(2))
    assert target.ids() == [9]
    assert proofs(target) == []


def test_a_writer_prepares_nothing_that_the_ledger_does_not_take(target: Target) -> None:
    writer, transactions = two_phase(target)
    ledger = target.sink.settings.ledger
    with closing(target.sink.endpoint.connect("other")) as session:
        ledger.record(session, context(target).transaction(CheckpointId(1)), 1)
        writer.write(ids(1))
        with pytest.raises(PreCommitFailed, match="was already committed: the ledger contains it"):
            writer.pre_commit(CheckpointId(1))
        writer, transactions = two_phase(target, first_checkpoint=CheckpointId(2))
        assert ledger.claim(session, SINK_ID, "job", FenceOwner("log", AttemptId(2)), "two_phase")
        writer.write(ids(1))
        with pytest.raises(Fenced, match="attempt 2 has claimed the sink; attempt 1 stops"):
            writer.pre_commit(CheckpointId(2))
        session.execute("DELETE FROM onceflow_sinks")
        writer, transactions = two_phase(target, first_checkpoint=CheckpointId(2))
        writer.write(ids(1))
        with pytest.raises(PreCommitFailed, match="was not checked before this attempt, or its"):
            writer.pre_commit(CheckpointId(2))
    assert transactions.ended == []
    assert target.ids() == []


def test_a_name_that_is_prepared_already_is_refused_by_name(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        return False

    monkeypatch.setattr(Ledger, "record", refuse)
    writer, _ = two_phase(target)
    writer.write(ids(1))
    with pytest.raises(PreCommitFailed, match=rf"{SINK_ID}/1/1/0/0 is already prepared.* end "):
        writer.pre_commit(CheckpointId(1))
    assert target.ids() == []


def test_a_table_that_was_altered_under_a_writer_fails_its_checkpoint(target: Target) -> None:
    writer, _ = two_phase(target)
    with closing(writer):
        target.write("DROP TABLE rows; CREATE TABLE rows (id TEXT NOT NULL)")
        writer.write(ids(1))
        with pytest.raises(PreCommitFailed, match="column 'id' was INTEGER when the rows were"):
            writer.pre_commit(CheckpointId(1))
    assert target.ids() == []


def test_a_checkpoint_asks_about_the_tables_of_its_own_rows_alone(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    read = SQLiteDialect.read_column_facts

    def note(dialect: SQLiteDialect, session: Session, name: Any) -> Any:
        asked.append(name.name)
        return read(dialect, session, name)

    monkeypatch.setattr(SQLiteDialect, "read_column_facts", note)
    target.write("CREATE TABLE other (id INTEGER NOT NULL)")
    schema = pa.schema([*SCHEMA, ("table", pa.string())])
    target.sink = replace(target.sink, table_column="table")
    writer, _ = two_phase(target, schema)
    with closing(writer):
        for checkpoint, table in ((1, None), (2, "other")):
            writer.write(pa.record_batch([[checkpoint], [table]], schema=schema))
            assert len(writer.pre_commit(CheckpointId(checkpoint))) == 1
    assert asked == ["rows", "other"]
    assert target.ids() == [1]
    assert rows_of(target, "SELECT id FROM other") == [(2,)]


def test_a_table_that_takes_no_rows_is_refused_before_the_first_and_leaves_no_session(
    target: Target,
) -> None:
    sessions: list[Session] = []
    given = context(target)

    def connect() -> Session:
        sessions.append(target.sink.endpoint.connect("writer"))
        return sessions[-1]

    for broken, raised in ((ConnectionLost("gone"), SinkError), (ConfigError("no"), ConfigError)):

        class Failing(SQLiteDialect):
            error = broken

            @override
            def find_table(self, session: Session, name: Any) -> Any:
                raise self.error

        settings = replace(target.sink.settings, dialect=Failing())
        with pytest.raises(raised):
            TwoPhaseWriter(settings, given, Preparing(connect, given))
    assert [session.is_open for session in sessions] == [False, False]


class Listing(Preparing):
    """Fails to begin, because of a lock."""

    @override
    def begin(self) -> Session:
        raise LockTimeout("locked")


@pytest.mark.parametrize(
    ("listed", "holders", "told", "untold"),
    [
        (0, [], "see the processes that have the file open for whose", "held by"),
        (0, ["session 7"], "Locks are held by session 7. A later", "prepared and not yet"),
        (2, [f"{SINK_ID}/1/1/0/0"], f"this sink are {SINK_ID}/1/1/0/0, ", "held by"),
        (5, ["session 7"], f"held by session 7. .*{SINK_ID}/1/4/0/0. Do not commit", "/1/5/0/0"),
    ],
)
def test_a_lock_that_is_waited_for_in_vain_is_told_with_its_holders(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    listed: int,
    holders: list[str],
    told: str,
    untold: str,
) -> None:
    def hold(*_: object) -> list[str]:
        return holders

    server = sql_committer_kit.Preparing(target.write)
    names = [context(target).transaction(CheckpointId(1 + number)) for number in range(listed)]
    server.prepared.update(names)
    monkeypatch.setattr(SQLiteDialect, "two_phase", server.find)
    monkeypatch.setattr(SQLiteDialect, "lock_holders", hold)
    settings, given = target.sink.settings, context(target)
    writer = TwoPhaseWriter(
        settings, given, Listing(lambda: settings.endpoint.connect("writer"), given)
    )
    with pytest.raises(SinkError, match=told) as caught:
        writer.write(ids(1))
        writer.pre_commit(CheckpointId(1))
    assert untold not in str(caught.value)


def test_an_error_of_a_lock_is_told_though_nobody_can_be_asked_for_its_holder(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Sequence[str]:
        raise StatementRefused("no")

    monkeypatch.setattr(SQLiteDialect, "lock_holders", refuse)
    settings, given = target.sink.settings, context(target)
    writer = TwoPhaseWriter(
        settings, given, Listing(lambda: settings.endpoint.connect("writer"), given)
    )
    with pytest.raises(SinkError, match="locked by another transaction for"):
        writer.write(ids(1))


# --- bad rows ------------------------------------------------------------------------------------


@pytest.fixture
def target_with_check(target: Target) -> Target:
    return refuse_multiples_of_7(target)


@pytest.mark.parametrize("chunk_rows", [1, 20_000])
def test_rows_that_the_server_refuses_are_left_out_and_all_others_written_in_order(
    target_with_check: Target, monkeypatch: pytest.MonkeyPatch, chunk_rows: int
) -> None:
    monkeypatch.setattr(row_loader, "_CHUNK_ROWS", chunk_rows)
    writer, transactions = two_phase(target_with_check, on_bad_row=OnBadRow.DROP)
    with closing(writer):
        writer.write(ids(*range(1, 15)))
        writer.write(ids(15, 21))
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert committable.rows == 13
        assert rejected_by(writer) == [7, 14, 21]
        writer.write(ids(28))
        assert writer.pre_commit(CheckpointId(2)) == (), "the only row was refused"
        writer.write(ids(16))
        (committable,) = writer.pre_commit(CheckpointId(3))
        assert committable.transaction.checkpoint == 3
    written = rows_of(target_with_check, "SELECT id FROM rows ORDER BY rowid")
    assert [id_ for (id_,) in written] == [*range(1, 7), *range(8, 14), 15, 16]
    assert [rows for _, rows in proofs(target_with_check)] == [13, 1]
    assert [name.checkpoint for name in transactions.begun] == [1, 2, 3]


def test_the_first_refused_row_ends_a_writer_whose_bad_rows_fail(target_with_check: Target) -> None:
    writer, _ = two_phase(target_with_check)
    with pytest.raises(BadRow, match="CHECK constraint failed"):
        writer.write(ids(1, 7))
    with pytest.raises(SinkError, match="the writer is closed"):
        writer.write(ids(2))
    assert target_with_check.ids() == []


def test_a_column_that_was_widened_for_a_refused_row_is_read_again(target: Target) -> None:
    schema = pa.schema([pa.field("id", pa.int64())])
    for on_bad_row in (OnBadRow.FAIL, OnBadRow.DROP):
        writer, _ = two_phase(target, schema, on_bad_row=on_bad_row)
        batch = pa.record_batch({"id": [None]}, schema=schema)
        if on_bad_row is OnBadRow.DROP:
            writer.write(batch)
        target.write("DROP TABLE rows; CREATE TABLE rows (id INTEGER)")
        with pytest.raises(SinkError, match="for which rows were refused, has changed since"):
            if on_bad_row is OnBadRow.DROP:
                writer.pre_commit(CheckpointId(1))
            else:
                writer.write(batch)
        target.write("DROP TABLE rows; CREATE TABLE rows (id INTEGER NOT NULL)")


# --- at least once -------------------------------------------------------------------------------


def test_rows_are_committed_as_soon_as_there_are_enough_and_at_the_checkpoint(
    target: Target,
) -> None:
    writer = at_least_once(target, flush_rows=3)
    seen: list[list[int]] = []
    with closing(writer):
        for numbers in ((1, 2), (3,), (4,)):
            writer.write(ids(*numbers))
            seen.append(target.ids())
        assert writer.pre_commit(CheckpointId(1)) == ()
        seen.append(target.ids())
        assert writer.pre_commit(CheckpointId(2)) == ()
        writer.write(ids(5))
    assert seen == [[], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4]]
    assert target.ids() == [1, 2, 3, 4]
    assert proofs(target) == []


def test_a_commit_without_answer_ends_the_writer(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: PlainTransactions) -> None:
        raise ConnectionLost("no answer")

    monkeypatch.setattr(PlainTransactions, "commit", fail)
    writer = at_least_once(target, flush_rows=1)
    with pytest.raises(SinkError, match="rows were not committed: no answer"):
        writer.write(ids(1))
    with pytest.raises(SinkError, match="the writer is closed"):
        writer.write(ids(1))


# --- the session ---------------------------------------------------------------------------------


def test_a_session_that_is_lost_between_transactions_is_opened_again(target: Target) -> None:
    sessions: list[Session] = []

    def connect() -> Session:
        sessions.append(target.sink.endpoint.connect("writer"))
        return sessions[-1]

    transactions = PlainTransactions(connect)
    sessions[0].close()
    assert transactions.begin() is sessions[1]
    assert transactions.begin() is sessions[1], "the transaction is open already"
    sessions[1].execute("INSERT INTO rows VALUES (1)")
    transactions.commit()
    transactions.roll_back()
    transactions.begin().execute("INSERT INTO rows VALUES (2)")
    transactions.roll_back()
    transactions.begin().execute("INSERT INTO rows VALUES (3)")
    transactions.commit()
    transactions.begin().execute("INSERT INTO rows VALUES (4)")
    transactions.close()
    assert not sessions[1].is_open
    assert transactions.begin() is sessions[2]
    sessions[2].execute("INSERT INTO rows VALUES (5)")
    transactions.roll_back()
    transactions.close()
    transactions.close()
    transactions.hasten()
    assert target.ids() == [1, 3]


def test_a_session_that_is_lost_within_a_transaction_loses_it(target: Target) -> None:
    writer, transactions = two_phase(target)
    writer.write(ids(1))
    transactions.session.close()
    with pytest.raises(SinkError, match="the session is closed"):
        writer.write(ids(2))
    assert target.ids() == []


def test_a_writer_that_is_closed_hastens_the_server(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    hastened: list[bool] = []

    def note(session: LossySession) -> None:
        hastened.append(session.is_open)

    monkeypatch.setattr(LossySession, "hasten", note)
    for on_bad_row in OnBadRow:
        two_phase(target, on_bad_row=on_bad_row)[0].close()
    assert hastened == [True] * len(OnBadRow)
