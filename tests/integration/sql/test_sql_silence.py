"""A connection to a database ends when the network loses its packets for half a minute."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from tests.integration.sql.databases import Database, Postgres

from onceflow.clients.mysql.connection import MySQLSession
from onceflow.clients.postgres.connection import PostgresSession, own
from onceflow.clients.sql.session import UNACKNOWLEDGED_S, Session

_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}


def _descriptor(session: Session) -> int:
    private: Any = session
    if isinstance(session, PostgresSession):
        return int(private._connection.fileno())
    assert isinstance(session, MySQLSession)
    return int(private._wire._descriptor)


def _option(session: Session, option: int) -> int:
    with socket.socket(fileno=os.dup(_descriptor(session))) as duplicate:
        return duplicate.getsockopt(socket.IPPROTO_TCP, option)


def test_every_connection_ends_when_nothing_was_acknowledged_for_half_a_minute(
    database: Database,
) -> None:
    with database.sink(table="ledger").settings.endpoint.connect("test") as session:
        assert _option(session, socket.TCP_USER_TIMEOUT) == UNACKNOWLEDGED_S * 1000
        assert {name: _option(session, name) for name in _KEEPALIVE} == _KEEPALIVE


def test_a_transfer_of_rows_may_wait_for_a_lock_as_long_as_for_a_reply(database: Database) -> None:
    database.query("CREATE TABLE ledger (id int PRIMARY KEY)")
    seen: list[int] = []
    sink = database.sink(table="ledger", statement_timeout_s=77)
    with sink.settings.endpoint.connect("test") as session:
        if isinstance(database, Postgres):
            copy = own(session).copy_in("COPY ledger FROM STDIN")
            copy.write(b"1\n")
            seen.append(_option(session, socket.TCP_USER_TIMEOUT))
            copy.end()
        else:
            assert isinstance(session, MySQLSession)
            load = "LOAD DATA LOCAL INFILE 'rows' INTO TABLE ledger (id)"
            session.send(load, [memoryview(b"1\n")])
            seen.append(_option(session, socket.TCP_USER_TIMEOUT))
            session.receive()
        seen.append(_option(session, socket.TCP_USER_TIMEOUT))
    assert seen == [77_000, UNACKNOWLEDGED_S * 1000]
    assert database.ids_in() == [1]


def test_a_limit_in_the_url_goes_before_our_own(database: Database) -> None:
    if not isinstance(database, Postgres):
        pytest.skip("only libpq has a setting for it")
    separator = "&" if "?" in database.url else "?"
    url = f"{database.url}{separator}tcp_user_timeout=9000&keepalives_idle=3"
    database.query("CREATE TABLE ledger (id int PRIMARY KEY)")
    with type(database)(url).sink(table="ledger").settings.endpoint.connect("test") as session:
        copy = own(session).copy_in("COPY ledger FROM STDIN")
        copy.write(b"1\n")
        assert _option(session, socket.TCP_USER_TIMEOUT) == 9000
        copy.end()
        assert _option(session, socket.TCP_USER_TIMEOUT) == 9000
        assert _option(session, socket.TCP_KEEPIDLE) == 3
