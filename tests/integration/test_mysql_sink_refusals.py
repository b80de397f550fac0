"""Settings of MySQL and MariaDB that no attempt could meet are set, or refused at the start."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest
from tests.integration.mysql_sink_kit import Job, ids_in, query

from onceflow.core.errors import ConfigError, TargetRefused
from onceflow.core.protocol.committables import Committed, RetryLater
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow
from onceflow.core.storage import FileStagingArea
from onceflow.integration.servers import EmbeddedMySQL
from onceflow.sinks import MySQLSink

SCHEMA = pa.schema([("id", pa.int64()), ("amount", pa.int64())])
_ROWS = pa.record_batch([pa.array([1, 2]), pa.array([10, 20])], schema=SCHEMA)
Mode = Literal["two_phase", "ledger"]


@pytest.fixture
def staging(tmp_path: Path) -> FileStagingArea:
    return FileStagingArea.in_directory(str(tmp_path), "job.ledger")


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


def test_a_row_without_a_value_for_a_generated_column_is_a_bad_row_before_its_decision(
    mysql_database: str, staging: FileStagingArea
) -> None:
    query(
        mysql_database,
        "CREATE TABLE ledger (id bigint PRIMARY KEY, amount bigint, shown varchar(20)"
        " GENERATED ALWAYS AS (concat(amount, ' it\\'s')) STORED NOT NULL,"
        " half bigint GENERATED ALWAYS AS (amount DIV 2) VIRTUAL)",
    )
    sink = MySQLSink(mysql_database, table="ledger", commit_mode="ledger")
    with Job(sink, schema=SCHEMA, staging=staging, on_bad_row=OnBadRow.DROP) as job:
        writer = job.check().writer()
        writer.write(pa.record_batch([pa.array([1, 2]), pa.array([None, 20])], schema=SCHEMA))
        (committable,) = writer.pre_commit(CheckpointId(1))
        (reason,) = [reason for part in writer.take_rejected() for reason in part.reasons]
        assert "of generated column shown" in reason
        assert job.committer().commit(committable) == Committed()
    assert query(mysql_database, "SELECT shown FROM ledger") == [("20 it's",)]


@pytest.mark.parametrize("mode", ["two_phase", "ledger"])
def test_a_trigger_that_gtids_do_not_allow_is_no_reason_to_try_again(
    staging: FileStagingArea, mode: Mode
) -> None:
    with EmbeddedMySQL({"gtid_mode": "ON", "enforce_gtid_consistency": "ON"}) as server:
        query(server.url, "CREATE DATABASE bank")
        bank = server.database_url("bank")
        query(
            bank,
            "CREATE TABLE ledger (id bigint PRIMARY KEY, amount bigint)",
            "CREATE TABLE audit (id bigint) ENGINE = MyISAM",
            "CREATE TRIGGER t AFTER INSERT ON ledger FOR EACH ROW"
            " INSERT INTO audit VALUES (NEW.id)",
        )
        sink = MySQLSink(bank, table="ledger", commit_mode=mode)
        with Job(sink, schema=SCHEMA, staging=staging) as job:
            writer = job.check().writer()
            writer.write(_ROWS)
            if mode == "two_phase":
                with pytest.raises(TargetRefused, match="GTID consistency"):
                    writer.pre_commit(CheckpointId(1))
                return
            (committable,) = writer.pre_commit(CheckpointId(1))
            refused = job.committer().commit(committable)
            assert isinstance(refused, RetryLater)
            assert refused.until_fixed
            assert "GTID consistency" in refused.reason
