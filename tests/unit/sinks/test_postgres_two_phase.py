"""Transactions that Postgres prepares are named, found and ended as the protocol needs it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import pytest
from typing_extensions import override

from onceflow.clients.postgres.connection import PostgresSession
from onceflow.clients.sql.session import (
    AccessDenied,
    ConnectionLost,
    NameTaken,
    NameUnknown,
    Session,
    StatementRefused,
)
from onceflow.core.errors import PreparedLimitReached, SinkError
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi import WriterContext
from onceflow.sinks.postgres.two_phase import PostgresTransactions, PostgresTwoPhase

CONTEXT = WriterContext(
    job="job",
    uid="rows",
    sink_id="job.rows",
    subtask=3,
    parallelism=4,
    attempt=AttemptId(2),
    first_checkpoint=CheckpointId(7),
)
NAME = "job.rows/2/7/3/0"


@dataclass
class Server:
    """Answers as Postgres does to what two-phase commits ask."""

    slots: int = 8
    gids: list[str] = field(default_factory=list[str])
    sent: list[str] = field(default_factory=list[str])
    sessions: list[PostgresSession] = field(default_factory=list[PostgresSession])
    connect_timeout_s: float = 1.0
    error: BaseException | None = None

    def connect(self, name: str) -> Session:
        self.sessions.append(PostgresDouble(self, name))
        return self.sessions[-1]

    def answer(self, statement: str) -> list[tuple[Any, ...]]:
        if self.error is not None:
            raise self.error
        if counted := re.search(r"starts_with\(gid, '(.*)'\)", statement):
            others = [gid for gid in self.gids if not gid.startswith(counted[1])]
            return [(self.slots, len(others))]
        if "current_setting" in statement:
            return [(self.slots,)]
        if listed := re.search(r"^SELECT (.*) FROM pg_catalog.pg_prepared_xacts", statement):
            named = re.search(r"gid = '(.*?)'", statement)
            found = [gid for gid in self.gids if named is None or gid == named[1]]
            values = {"gid": None, "1": 1, "prepared": datetime(2026, 1, 2)}
            return [(values[listed[1]] or gid,) for gid in found]
        self.sent.append(statement)
        return [(None,)]


class PostgresDouble(PostgresSession):
    """A session whose replies are those of `Server`."""

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name, self.open = server, name, True

    @property
    @override
    def is_open(self) -> bool:
        return self.open

    @override
    def query(self, statement: str) -> list[tuple[Any, ...]]:
        return self.server.answer(statement)

    @override
    def execute(self, statement: str) -> int:
        self.server.answer(statement)
        return 0

    @override
    def end_transaction(self, statement: str, answer: str) -> None:
        assert statement.startswith(answer)
        self.server.answer(statement)

    @override
    def begin(self) -> None:
        self.server.answer("BEGIN")

    @override
    def roll_back(self) -> None:
        self.server.answer("ROLLBACK")

    @override
    def close(self) -> None:
        self.open = False


@pytest.fixture
def server() -> Server:
    return Server()


def test_each_transaction_is_prepared_once_under_the_name_of_its_checkpoint(server: Server) -> None:
    transactions = PostgresTransactions(server, CONTEXT)
    transactions.begin()
    transactions.begin()
    assert str(transactions.transaction) == NAME
    transactions.prepare()
    transactions.expect(CheckpointId(9))
    transactions.begin()
    transactions.prepare()
    transactions.roll_back()
    assert server.sent == [
        "BEGIN",
        f"PREPARE TRANSACTION '{NAME}'",
        "BEGIN",
        "PREPARE TRANSACTION 'job.rows/2/9/3/0'",
    ]
    (session,) = server.sessions
    assert isinstance(session, PostgresDouble)
    assert session.name == "onceflow job.rows/2/3 writer"
    assert session.is_open


def test_changes_wait_for_the_locks_of_this_writers_earlier_transactions_alone(
    server: Server,
) -> None:
    earlier = PostgresTransactions(server, CONTEXT)
    earlier.order_changes()
    earlier.begin()
    earlier.prepare()
    (_, lock, prepare) = server.sent
    number = re.fullmatch(r"SELECT pg_catalog.pg_advisory_xact_lock\((-?\d+)\)", lock)
    assert number is not None
    assert -(2**63) <= int(number[1]) < 2**63
    assert prepare.startswith("PREPARE")
    server.sent.clear()
    server.gids = [NAME, "job.rows/1/7/3/0", "job.rows/2/7/2/0", "other/2/7/3/0", "foreign"]
    earlier.await_earlier()
    assert server.sent == [f"SELECT pg_catalog.pg_advisory_xact_lock_shared({number[1]})"]


def test_a_name_that_is_prepared_already_is_refused_and_its_transaction_rolled_back(
    server: Server,
) -> None:
    transactions = PostgresTransactions(server, CONTEXT)
    transactions.begin()
    server.error = NameTaken("in use")
    with pytest.raises(SinkError, match=f"{NAME} is already prepared.*ROLLBACK PREPARED '{NAME}'"):
        transactions.prepare()
    server.error = None
    transactions.roll_back()
    assert server.sent == ["BEGIN", "ROLLBACK"]


@pytest.mark.parametrize(("slots", "fits"), [(7, False), (8, True)])
def test_a_writer_needs_two_slots_for_each_subtask(server: Server, slots: int, fits: bool) -> None:
    server.slots = slots
    server.gids = [f"foreign {number}" for number in range(8)]
    if fits:
        PostgresTransactions(server, CONTEXT)
    else:
        with pytest.raises(PreparedLimitReached, match="job.rows subtask 3 of 4: .* = 7") as caught:
            PostgresTransactions(server, CONTEXT)
        assert caught.value.room == 7
    assert [session.is_open for session in server.sessions] == [fits]


@pytest.mark.parametrize(("others", "room"), [(0, 8), (4, 4), (5, 3), (9, 0)])
def test_a_batch_needs_a_slot_for_each_subtask_that_no_other_holds(
    server: Server, others: int, room: int
) -> None:
    server.gids = ["job.rows/2/1/0/0", "job.rows/2/1/1/0"]
    server.gids += ["job.rows/21/1/1/0"] * others
    context = replace(CONTEXT, checkpoints_at_once=1)
    if room >= 4:
        PostgresTransactions(server, context)
    else:
        with pytest.raises(PreparedLimitReached, match=f"has room for {room}: .*{others} in use"):
            PostgresTransactions(server, context)
    assert [session.is_open for session in server.sessions] == [room >= 4]


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ConnectionLost("gone"), SinkError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_server_that_is_not_asked_about_its_slots_leaves_no_session(
    server: Server, error: BaseException, raised: type[BaseException]
) -> None:
    server.error = error
    with pytest.raises(raised):
        PostgresTransactions(server, CONTEXT)
    assert [session.is_open for session in server.sessions] == [False]


def test_what_is_prepared_is_listed_by_sink_id_and_ended_by_name(server: Server) -> None:
    two_phase, session = PostgresTwoPhase("public"), server.connect("committer")
    names = [TransactionId("job.rows", 2, checkpoint, 3) for checkpoint in (7, 10)]
    server.gids = [str(names[1]), "job.rows2/2/7/3/0", "foreign", str(names[0])]
    assert two_phase.list_prepared(session, "job.rows") == tuple(names)
    assert two_phase.is_prepared(session, names[0])
    assert two_phase.find_prepare_time(session, names[0]) == datetime(2026, 1, 2)
    unknown = replace(names[0], checkpoint=8)
    assert not two_phase.is_prepared(session, unknown)
    assert two_phase.find_prepare_time(session, unknown) is None
    assert two_phase.commit_is_proof(session)
    two_phase.commit(session, names[0])
    two_phase.roll_back(session, names[1])
    assert server.sent == [
        f"COMMIT PREPARED '{NAME}'",
        "ROLLBACK PREPARED 'job.rows/2/10/3/0'",
    ]
    for error in (NameUnknown("x"), AccessDenied("x"), StatementRefused("x")):
        server.error = error
        with pytest.raises(type(error)):
            two_phase.commit(session, names[0])
        with pytest.raises(type(error)):
            two_phase.roll_back(session, names[0])
    assert "is being prepared, or is in another" in two_phase.end_holding_session(session, names[0])
    assert two_phase.endings(names[0]) == f"COMMIT PREPARED or ROLLBACK PREPARED '{NAME}'"
    server.error = None
    writers = two_phase.transactions(server, CONTEXT)
    assert str(writers.transaction) == NAME
