"""Settings of MySQL and MariaDB that no attempt could meet are set, or refused at the start."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import pyarrow as pa
import pytest
from tests.integration.mysql_sink_kit import Job, ids_in, query

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.committables import Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import MySQLSink

SCHEMA = pa.schema([("id", pa.int64()), ("amount", pa.int64())])
_ROWS = pa.record_batch([pa.array([1, 2]), pa.array([10, 20])], schema=SCHEMA)


@contextmanager
def server_setting(url: str, name: str, value: str, usual: str) -> Generator[None, None, None]:
    """Set `name` for all new sessions of the server in the block."""
    query(url, f"SET GLOBAL {name} = {value}", "SELECT 1")
    try:
        yield
    finally:
        query(url, f"SET GLOBAL {name} = {usual}", "SELECT 1")


def test_a_table_without_a_key_is_refused_at_the_start_where_the_server_wants_one(
    mysql_database: str,
) -> None:
    sink = MySQLSink(mysql_database, table="t", create=True)
    with server_setting(mysql_database, "sql_require_primary_key", "ON", "OFF"):
        with (
            Job(sink, schema=SCHEMA) as job,
            pytest.raises(ConfigError, match=r"primary_key=… where each table must have a key"),
        ):
            job.check()
        # The advice, followed.
        keyed = MySQLSink(mysql_database, table="t", create=True, primary_key=("id",))
        with Job(keyed, schema=SCHEMA) as job:
            job.check(2)
            committable = job.prepare(1, _ROWS, attempt=2)
            assert job.committer(2).commit(committable) == Committed()
    assert ids_in(mysql_database, "t") == [1, 2]


@pytest.mark.servers
def test_a_transaction_outlives_the_idle_limit_of_mariadb(mariadb_database: str) -> None:
    query(mariadb_database, "CREATE TABLE t (id bigint PRIMARY KEY, amount bigint)", "SELECT 1")
    sink = MySQLSink(mariadb_database, table="t", commit_mode="two_phase")
    with (
        server_setting(mariadb_database, "idle_write_transaction_timeout", "1", "0"),
        Job(sink, schema=SCHEMA) as job,
    ):
        job.check()
        writer = job.writer()
        writer.write(_ROWS)
        time.sleep(2.5)  # its transaction is idle for longer than it may be
        (committable,) = writer.pre_commit(CheckpointId(1))
        writer.close()
        assert job.committer().commit(committable) == Committed()
    assert ids_in(mariadb_database, "t") == [1, 2]
