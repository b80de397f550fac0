"""Which commit mode is chosen for MySQL and MariaDB, and how rows go where LOAD DATA is off."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pyarrow as pa
import pytest
from tests.integration.mysql_sink_kit import FLAVORS, Job, ids_in, prepared, query, sessions
from tests.integration.sink_kit import SCHEMA, rows

from onceflow.core.errors import BadRow, ConfigError
from onceflow.core.protocol.committables import Aborted, AlreadyCommitted, Committable, Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi.staging import is_staged, make_staged_committable
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import MySQLSink

LOGGER = "onceflow.sinks.mysql"
# What LOAD DATA, INSERT and both servers' quoting might take for something else.
_ODD = ["", "NULL", "\\N", "a\tb\nc\r\0\x1a", 'it\'s "quoted" \\', "ein Pfund 🐟", "日本語", "%s ?"]


@pytest.fixture(params=FLAVORS)
def url(request: pytest.FixtureRequest) -> str:
    """URL of a new database, of both servers in turn."""
    found: str = request.getfixturevalue(f"{request.param}_database")
    return found


@pytest.fixture
def staging(tmp_path: Path) -> FileStagingArea:
    return FileStagingArea.in_directory(str(tmp_path / "storage"), "job.ledger")


def _auto(url: str, staging: FileStagingArea | None) -> Job:
    return Job(MySQLSink(url, table="ledger", create=True), staging=staging)


def _recorded(url: str) -> list[tuple[Any, ...]]:
    return query(url, "SELECT sink_id, attempt, commit_mode FROM onceflow_sinks")


@contextmanager
def _set(url: str, **variables: str) -> Generator[None, None, None]:
    """A server that is set up otherwise, for everybody who connects meanwhile."""
    before = {name: query(url, f"SELECT @@GLOBAL.{name}")[0][0] for name in variables}
    query(url, *(f"SET GLOBAL {name} = '{value}'" for name, value in variables.items()))
    try:
        yield
    finally:
        query(url, *(f"SET GLOBAL {name} = {_literal(value)}" for name, value in before.items()))


def _literal(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


def _written(job: Job, checkpoint: int, ids: range) -> Committable:
    """Return what one commit of `ids` has pre-committed."""
    committable = job.prepare(checkpoint, ids)
    assert job.committer().commit(committable) == Committed()
    assert job.committer().commit(committable) == AlreadyCommitted()
    return committable


def test_ledger_is_chosen_for_a_user_who_may_not_list_what_is_prepared(
    mysql_database: str, staging: FileStagingArea, caplog: pytest.LogCaptureFixture
) -> None:
    """MySQL asks for XA_RECOVER_ADMIN, which managed databases do not give away."""
    caplog.set_level(logging.INFO, LOGGER)
    parts = urlsplit(mysql_database)
    user = f"u{parts.path[-12:]}"
    query(
        mysql_database,
        f"CREATE USER {user} IDENTIFIED BY 'some-Pass-0'",
        f"GRANT ALL ON {parts.path[1:]}.* TO {user}",
    )
    try:
        address = f"{user}:some-Pass-0@{parts.hostname}:{parts.port}"
        limited = urlunsplit(parts._replace(netloc=address))
        with _auto(limited, staging) as job:
            assert is_staged(_written(job.check(), 1, range(3)))
            left = job.prepare(2, range(3, 5))
            assert job.committer().in_doubt() == (make_staged_committable(left.transaction),)
            assert job.committer().abort(left) == Aborted()
        with _auto(limited, None) as job, pytest.raises(ConfigError, match="XA_RECOVER_ADMIN"):
            job.check(2)
        assert "auto chose ledger: " in caplog.text
        assert "may not list prepared transactions; needed: XA_RECOVER_ADMIN" in caplog.text
        assert f"GRANT XA_RECOVER_ADMIN ON *.* TO '{user}'" in caplog.text
    finally:
        query(mysql_database, f"DROP USER {user}")
    assert _recorded(mysql_database) == [("job.ledger", 1, "ledger")]
    assert ids_in(mysql_database) == [0, 1, 2]


def test_ledger_is_chosen_where_prepared_transactions_stay_with_their_session(
    mysql_database: str, staging: FileStagingArea, caplog: pytest.LogCaptureFixture
) -> None:
    """As in MySQL before 8.0.29."""
    caplog.set_level(logging.INFO, LOGGER)
    with _set(mysql_database, xa_detach_on_prepare="OFF"):
        with _auto(mysql_database, staging) as job:
            assert is_staged(_written(job.check(), 1, range(3)))
        assert "auto chose ledger: xa_detach_on_prepare = OFF" in caplog.text
        sink = MySQLSink(mysql_database, table="ledger", commit_mode="two_phase")
        with Job(sink, staging=staging) as job:
            with pytest.raises(ConfigError, match="commit_mode='ledger'") as failure:
                job.check(2)
            said = str(failure.value)
            query(mysql_database, said[said.index("SET PERSIST") : said.index("; or pass")])
            job.check(2)
        query(mysql_database, "RESET PERSIST xa_detach_on_prepare")
    assert ids_in(mysql_database) == [0, 1, 2]


class _Proxy:
    """Stands between clients and server, and tells clients numbers of its own for their sessions.

    As poolers do, which is how one is told from a server. Each client has a server session of its
    own, so what is written behind it shows what a proxy's presence changes, and nothing else.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(60)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target, timeout=10)
            server.settimeout(None)
            self._sockets += [client, server]
            client.sendall(_renumbered(server))
            for pair in ((client, server), (server, client)):
                self._threads.append(threading.Thread(target=_copy, args=pair, daemon=True))
                self._threads[-1].start()


def _copy(reader: socket.socket, writer: socket.socket) -> None:
    try:
        while chunk := reader.recv(65536):
            writer.sendall(chunk)
        writer.shutdown(socket.SHUT_WR)
    except OSError:
        return


def _renumbered(server: socket.socket) -> bytes:
    """Return the server's greeting with another session's number, which stands after its version.

    Source: MySQL's client/server protocol, Protocol::HandshakeV10.
    """
    greeting = bytearray()
    while len(greeting) < 4 or len(greeting) < 4 + int.from_bytes(greeting[:3], "little"):
        greeting += server.recv(4096)
    number = greeting.index(0, 5) + 1
    greeting[number : number + 4] = (4_000_000_000).to_bytes(4, "little")
    return bytes(greeting)


@pytest.fixture
def proxied(url: str) -> Iterator[str]:
    """The same database, reached through a proxy."""
    parts = urlsplit(url)
    proxy = _Proxy((str(parts.hostname), int(parts.port or 3306)))
    address = f"{parts.username}:{parts.password}@127.0.0.1:{proxy.port}"
    yield urlunsplit(parts._replace(netloc=address))
    proxy.close()


def test_ledger_is_chosen_and_works_behind_a_proxy_that_hands_out_sessions(
    url: str, proxied: str, staging: FileStagingArea, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    with _auto(proxied, staging) as job:
        writer = job.check().writer()
        writer.write(rows([1]))
        assert "auto chose ledger: the connection goes through a proxy" in caplog.text
        assert sessions(url) == [], "nothing of the pool is held between barriers"
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert job.committer().commit(committable) == Committed()
    sink = MySQLSink(proxied, table="ledger", commit_mode="two_phase")
    with (
        Job(sink, staging=staging) as job,
        pytest.raises(ConfigError, match="the connection goes through a proxy"),
    ):
        job.check(2)
    assert ids_in(url) == [1]


def _texts(count: int) -> pa.RecordBatch:
    texts = [_ODD[number % len(_ODD)] if number % 9 else None for number in range(count)]
    numbers = pa.array(range(count), pa.int64())
    return pa.record_batch([numbers, pa.array(texts), numbers], schema=SCHEMA)


def _statements(url: str) -> dict[str, int]:
    found = query(url, "SHOW GLOBAL STATUS WHERE Variable_name IN ('Com_load', 'Com_insert')")
    return {str(name): int(value) for name, value in found}


@pytest.mark.parametrize("commit_mode", ["two_phase", "ledger"])
@pytest.mark.parametrize("allowed", [True, False], ids=["load-data", "insert"])
def test_rows_arrive_the_same_by_load_data_and_where_it_is_off_by_inserts_of_many_rows(
    url: str,
    staging: FileStagingArea,
    caplog: pytest.LogCaptureFixture,
    allowed: bool,
    commit_mode: Any,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    count = 20_000
    batch = _texts(count)
    sink = MySQLSink(url, table="ledger", create=True, commit_mode=commit_mode)
    with _set(url, local_infile="ON" if allowed else "OFF"), Job(sink, staging=staging) as job:
        writer = job.check().writer()
        before = _statements(url)
        writer.write(batch)
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert job.committer().commit(committable) == Committed()
        used = {name: after - before[name] for name, after in _statements(url).items()}
        assert job.committer().commit(committable) == AlreadyCommitted()
    found = query(url, "SELECT id, account, amount FROM ledger ORDER BY id")
    assert found == list(zip(*(column.to_pylist() for column in batch.columns), strict=True))
    assert ("local_infile = OFF, so rows go by INSERT" in caplog.text) == (not allowed)
    if allowed:
        assert used["Com_load"] > 0
    else:
        assert used["Com_load"] == 0
        assert used["Com_insert"] < 20, "many rows a statement"


def test_refused_row_is_named_where_rows_go_by_insert(url: str) -> None:
    query(url, "CREATE TABLE ledger (id bigint PRIMARY KEY, account text, amount bigint)")
    with _set(url, local_infile="OFF"), Job(MySQLSink(url, table="ledger")) as job:
        writer = job.check().writer()
        writer.write(rows([1, 2, 2, 3]))
        with pytest.raises(BadRow, match="Duplicate entry '2'"):
            writer.pre_commit(CheckpointId(1))
    assert prepared(url) == []
    assert ids_in(url) == []
