"""XA transactions are named, found and ended as the protocol needs it, in MySQL and in MariaDB."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import pytest
from typing_extensions import override

from onceflow.clients.mysql.catalog import XaNames
from onceflow.clients.mysql.connection import XA_FATAL, MySQLSession
from onceflow.clients.sql.session import (
    AccessDenied,
    NameTaken,
    NameUnknown,
    Session,
    StatementRefused,
)
from onceflow.core.errors import SinkError
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi import WriterContext
from onceflow.sinks.mysql.two_phase import XaTransactions, XaTwoPhase

CONTEXT = WriterContext(
    job="job",
    uid="rows",
    sink_id="job.rows",
    subtask=3,
    parallelism=4,
    attempt=AttemptId(2),
    first_checkpoint=CheckpointId(7),
)
NAMES = XaNames("shop")
NAME = TransactionId("job.rows", 2, 7, 3)
XID = NAMES.xid(NAME)
FORMAT_ID = int(XID.rpartition(",")[2])


@dataclass
class Server:
    """Answers as MySQL or MariaDB does to what two-phase commits ask."""

    is_mariadb: bool = False
    branches: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    sent: list[str] = field(default_factory=list[str])
    sessions: list[MySQLSession] = field(default_factory=list[MySQLSession])
    refused_locks: int = 0
    owner: int | None = None
    connect_timeout_s: float = 1.0
    errors: dict[str, Exception] = field(default_factory=dict[str, Exception])
    """The errors of statements, by their beginning."""

    def connect(self, name: str) -> Session:
        self.sessions.append(MySQLDouble(self, name))
        return self.sessions[-1]

    def answer(self, statement: str) -> list[tuple[Any, ...]]:
        self.sent.append(re.sub(r"onceflow/\w+", "LOCK", statement))
        for begin, error in self.errors.items():
            if statement.startswith(begin):
                raise error
        if statement == "XA RECOVER":
            return self.branches
        if "GET_LOCK" in statement:
            self.refused_locks -= 1
            return [(0 if self.refused_locks >= 0 else 1,)]
        answers = {"IS_USED_LOCK": self.owner, "CURRENT_USER": "a@%", "UNIX_TIMESTAMP": 86400}
        return [(value,) for word, value in answers.items() if word in statement]


class MySQLDouble(MySQLSession):
    """A session whose replies are those of `Server`."""

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name, self.open = server, name, True
        self.is_mariadb = server.is_mariadb

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
    def close(self) -> None:
        self.open = False


WRITERS_LOCK = "SELECT GET_LOCK('LOCK/3', 2)"


def xid(checkpoint: int) -> str:
    return NAMES.xid(CONTEXT.transaction(CheckpointId(checkpoint)))


def test_a_transaction_is_named_when_it_begins_and_prepared_under_that_name() -> None:
    server = Server()
    transactions = XaTransactions(NAMES, server, CONTEXT)
    with pytest.raises(SinkError, match="no transaction is open"):
        _ = transactions.transaction
    transactions.begin()
    transactions.expect(CheckpointId(8))
    transactions.begin()
    assert transactions.transaction == NAME
    transactions.prepare()
    transactions.begin()
    transactions.roll_back()
    transactions.roll_back()
    assert server.sent == [
        WRITERS_LOCK,
        f"XA START {XID}",
        f"XA END {XID}",
        f"XA PREPARE {XID}",
        f"XA START {xid(8)}",
        f"XA END {xid(8)}",
        f"XA ROLLBACK {xid(8)}",
    ]
    (session,) = server.sessions
    assert isinstance(session, MySQLDouble)
    assert session.name == "onceflow job.rows/2 subtask 3 writer"
    assert session.is_open


def test_mariadbs_session_lets_go_of_what_it_has_prepared_and_can_be_found_until_then() -> None:
    server = Server(is_mariadb=True)
    transactions = XaTransactions(NAMES, server, CONTEXT)
    transactions.begin()
    transactions.prepare()
    assert [session.is_open for session in server.sessions] == [False]
    transactions.expect(CheckpointId(8))
    transactions.begin()
    assert [session.is_open for session in server.sessions] == [False, True]
    assert server.sent == [
        WRITERS_LOCK,
        f"XA START {XID}",
        "SELECT GET_LOCK('LOCK', 0)",
        f"XA END {XID}",
        f"XA PREPARE {XID}",
        WRITERS_LOCK,
        f"XA START {xid(8)}",
    ]


def test_the_lock_by_which_a_writer_is_found_is_asked_for_until_it_is_got(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(refused_locks=2)
    transactions = XaTransactions(NAMES, server, CONTEXT)
    assert "another session has held the lock" in caplog.text
    for _ in range(3):
        transactions.begin()
        transactions.roll_back()
    locks = [statement for statement in server.sent if "GET_LOCK" in statement]
    again = "SELECT GET_LOCK('LOCK/3', 0)"
    assert locks == [WRITERS_LOCK, again, again]
    caplog.clear()
    XaTransactions(NAMES, server, CONTEXT)
    assert caplog.text == ""


def test_a_name_that_is_prepared_already_is_refused_and_nothing_is_open() -> None:
    server = Server(errors={"XA START": NameTaken("in use")})
    transactions = XaTransactions(NAMES, server, CONTEXT)
    with pytest.raises(SinkError, match=f"{NAME} is already prepared.* XA ROLLBACK {XID}"):
        transactions.begin()
    transactions.roll_back()
    assert server.sent == [WRITERS_LOCK, f"XA START {XID}"]


def branch(name: str, qualifier: str = "shop", format_id: int = FORMAT_ID) -> tuple[Any, ...]:
    return (format_id, len(name), len(qualifier), name + qualifier)


def test_what_is_prepared_is_listed_by_sink_id_and_ledger() -> None:
    server, two_phase = Server(), XaTwoPhase("shop")
    session = server.connect("committer")
    later = TransactionId("job.rows", 2, 10, 3)
    as_bytes = branch(str(NAME))
    server.branches = [
        branch(str(later)),
        branch("other/2/7/3/0"),
        branch(str(NAME), "shop2"),
        branch(str(NAME), format_id=FORMAT_ID + 1),
        branch("foreign"),
        (*as_bytes[:3], as_bytes[3].encode()),
    ]
    assert two_phase.list_prepared(session, "job.rows") == (NAME, later)
    assert two_phase.is_prepared(session, later)
    assert two_phase.may_list(session)
    time = two_phase.find_prepare_time(session, NAME)
    assert time == datetime(1970, 1, 2, tzinfo=timezone.utc)
    assert server.sent[-2].endswith("READ UNCOMMITTED")
    assert server.sent[-1].endswith(
        f"FROM `shop`.`onceflow_ledger` WHERE transaction_id = '{NAME}'"
    )
    assert two_phase.find_prepare_time(session, TransactionId("job.rows", 2, 8, 3)) is None
    assert server.sent[-1] == "XA RECOVER"
    two_phase.commit(session, NAME)
    two_phase.roll_back(session, NAME)
    assert server.sent[-2:] == [f"XA COMMIT {XID}", f"XA ROLLBACK {XID}"]
    assert two_phase.endings(NAME) == f"XA COMMIT or XA ROLLBACK {XID}"
    assert two_phase.transactions(server, CONTEXT).begin() is server.sessions[-1]
    assert server.sent[-1] == f"XA START {XID}"


@pytest.mark.parametrize(
    ("error", "may_not"),
    [
        (AccessDenied("no"), True),
        (StatementRefused("fatal", XA_FATAL), True),
        (StatementRefused("deadlock", "1213"), False),
    ],
)
def test_a_list_that_may_not_be_read_is_told_with_the_grant(
    error: Exception, may_not: bool
) -> None:
    server, two_phase = Server(errors={"XA RECOVER": error}), XaTwoPhase("shop")
    session = server.connect("committer")
    if may_not:
        assert not two_phase.may_list(session)
        with pytest.raises(AccessDenied, match="GRANT XA_RECOVER_ADMIN"):
            two_phase.list_prepared(session, "job.rows")
    else:
        with pytest.raises(StatementRefused, match="deadlock"):
            two_phase.may_list(session)


@pytest.mark.parametrize("is_mariadb", [False, True])
@pytest.mark.parametrize("owner", [None, 5])
def test_only_mariadbs_sessions_hold_what_they_prepare_and_reply_too_early(
    is_mariadb: bool, owner: int | None
) -> None:
    server, two_phase = Server(is_mariadb, owner=owner), XaTwoPhase("shop")
    session = server.connect("committer")
    assert two_phase.is_held(session, NAME) is (is_mariadb and owner is not None)
    assert two_phase.commit_is_proof(session) is not is_mariadb


@pytest.mark.parametrize(
    ("owner", "error", "told"),
    [
        (None, None, "is being prepared, committed or aborted"),
        (5, None, "was held by session 5, which .* it is being ended"),
        (5, NameUnknown("gone"), "was held by session 5, which .* it is being ended"),
        (5, AccessDenied("no"), "is held by session 5, .* and cannot be ended: no"),
    ],
)
def test_a_session_that_holds_a_transaction_is_ended_by_the_lock_of_that_transaction(
    owner: int | None, error: Exception | None, told: str
) -> None:
    server = Server(is_mariadb=True, owner=owner, errors={"KILL": error} if error else {})
    outcome = XaTwoPhase("shop").end_holding_session(server.connect("committer"), NAME)
    assert re.search(told, outcome)
    assert server.sent == ["SELECT IS_USED_LOCK('LOCK')", *(["KILL 5"] if owner else [])]
