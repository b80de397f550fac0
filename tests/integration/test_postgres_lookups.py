"""Records are joined with a Postgres table that changes, each value exactly."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.rows import TupleRow
from tests.integration.postgres_changes_kit import open_database
from tests.runtime.test_union import begin
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.held_up import await_checkpoint, kill_a_slot

from onceflow import JobState, LocalProcesses
from onceflow.cli.run.file.connector_file import read_connector_file
from onceflow.core.errors import BadRecord, ConfigError
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sources import PostgresTable

ACCOUNTS = """
    CREATE TABLE accounts (
        id int PRIMARY KEY, name varchar(20) UNIQUE, code uuid UNIQUE, vip bool,
        balance numeric(20, 5), opened timestamptz, tags text[], spare numeric
    );
    INSERT INTO accounts VALUES
        (1, 'Ada', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', true, 12345678901234.56789,
         '1999-12-31 23:59:59.999999+00', '{a,NULL,"b,c"}', 0.123),
        (2, 'ada', 'b0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', false, -0.00001, NULL, '{}', 'NaN'),
        (3, 'O''Brien\\', NULL, NULL, NULL, NULL, NULL, NULL)
"""


@pytest.fixture(scope="module")
def server() -> Generator[EmbeddedPostgres]:
    with EmbeddedPostgres() as running:
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Generator[psycopg.Connection[TupleRow]]:
    with open_database(server, ACCOUNTS) as connection:
        yield connection


def look_up(table: PostgresTable, **keys: list[Any]) -> list[dict[str, Any]]:
    table.describe(tuple(keys))
    types = {"id": pa.int64(), "vip": pa.bool_()}
    asked = pa.RecordBatch.from_pydict(
        {name: pa.array(values, types.get(name, pa.string())) for name, values in keys.items()}
    )
    with closing(table.open(tuple(keys), "a test")) as reader:
        return reader.read(asked).to_pylist()


@pytest.mark.parametrize(
    ("keys", "ids"),
    [
        ({"id": [1, 3, 7, 2**40, -(2**63)]}, [1, 3]),
        ({"name": ["Ada", "O'Brien\\", "x\0", "'"]}, [1, 3]),
        ({"code": ["b0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "no uuid"]}, [2]),
        ({"vip": [False], "id": [2]}, [2]),
        ({"name": ["Ada", "ada"], "id": [2, 2]}, [2]),
        ({"name": ["x\0"]}, []),
    ],
    ids=["integer", "text", "uuid", "boolean", "two columns", "nothing to ask"],
)
def test_rows_are_found_by_each_kind_of_key(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    keys: dict[str, list[Any]],
    ids: list[int],
) -> None:
    found = look_up(PostgresTable(server.url, table="accounts"), **keys)
    assert sorted(row["id"] for row in found) == ids
    columns = "id, name, code::text, vip, balance, opened, tags, spare::text"
    rows = database.execute(f"SELECT {columns} FROM accounts".encode()).fetchall()
    by_id = {row[0]: row for row in rows}
    assert [tuple(row.values()) for row in found] == [by_id[row["id"]] for row in found]


def test_a_value_without_an_exact_form_is_refused(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    table = PostgresTable(server.url, table="accounts", schema="id INT, spare DECIMAL(10, 2)")
    assert [row["spare"] for row in look_up(table, id=[3])] == [None]
    with pytest.raises(BadRecord, match=r"column 'spare' of table \S*accounts: the value"):
        look_up(table, id=[1])
    with pytest.raises(BadRecord, match="NaN"):
        look_up(table, id=[2])


def test_generated_columns_are_read(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("ALTER TABLE accounts ADD twice int GENERATED ALWAYS AS (id * 2) STORED")
    found = look_up(PostgresTable(server.url, table="accounts"), id=[2])
    assert [row["twice"] for row in found] == [4]


def test_a_table_that_cannot_be_looked_up_is_refused(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    table = PostgresTable(server.url, table="accounts")
    with pytest.raises(ConfigError, match=r"lookup_join\(on='balance'\): .*numeric"):
        table.describe(("balance",))
    with pytest.raises(ConfigError, match="there is no table"):
        PostgresTable(server.url, table="nobody").describe(("id",))
    with caplog.at_level(logging.WARNING):
        table.describe(("id",))
        assert not caplog.messages
        table.describe(("vip",))
    assert "CREATE INDEX ON" in caplog.text
    records = begin(LocalProcesses(), tmp_path).read(CountingSource(1), uid="records")
    with pytest.raises(ConfigError, match="the table has no such column"):
        records.lookup_join(table, "account")


def test_a_user_needs_rights_on_the_read_columns_alone(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    table = PostgresTable(
        server.url, table="accounts", schema="name STRING, vip BOOLEAN", user="clerk", password="x"
    )
    database.execute("CREATE ROLE clerk LOGIN PASSWORD 'x'")
    try:
        with pytest.raises(ConfigError, match="permission denied.*grant"):
            look_up(table, name=["Ada"])
        database.execute("GRANT SELECT (name, vip) ON accounts TO clerk")
        assert look_up(table, name=["Ada"]) == [{"name": "Ada", "vip": True}]
        database.execute("ALTER TABLE accounts ENABLE ROW LEVEL SECURITY")
        with pytest.raises(ConfigError, match="row-level security.*BYPASSRLS"):
            look_up(table, name=["Ada"])
        database.execute("ALTER ROLE clerk BYPASSRLS")
        assert look_up(table, name=["Ada"]) == [{"name": "Ada", "vip": True}]
    finally:
        database.execute("DROP OWNED BY clerk; DROP ROLE clerk")


def test_a_key_outside_the_encoding_of_the_database_has_no_row(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("DROP DATABASE IF EXISTS western")
    database.execute("CREATE DATABASE western TEMPLATE template0 ENCODING 'WIN1252' LOCALE 'C'")
    url = server.database_url("western")
    with psycopg.connect(url, autocommit=True) as western:
        western.execute("CREATE TABLE names (name text PRIMARY KEY, note text)")
        western.execute("INSERT INTO names VALUES ('é', 'x'), ('a', NULL), ('b', chr(129))")
    table = PostgresTable(url, table="names")
    found = look_up(table, name=["é", "Ж", "a", "Ы"])
    assert sorted(row["name"] for row in found) == ["a", "é"]
    assert look_up(table, name=["Ж"]) == []
    with pytest.raises(BadRecord, match="no equivalent in encoding .UTF8"):
        look_up(table, name=["Ж", "b"])


def test_a_column_of_another_type_stops_the_lookups(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    table = PostgresTable(server.url, table="accounts", schema="id INT, vip BOOLEAN, name STRING")
    keys = pa.RecordBatch.from_pydict({"id": [1]})
    table.describe(("id",))
    with closing(table.open(("id",), "a test")) as reader:
        database.execute("ALTER TABLE accounts ADD COLUMN later int, DROP COLUMN tags")
        assert reader.read(keys).num_rows == 1
        database.execute("ALTER TABLE accounts ALTER vip TYPE int USING 1")
        with pytest.raises(ConfigError, match="column .vip. of table public.accounts .*again"):
            reader.read(keys)


def test_a_lost_connection_is_opened_again(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    table = PostgresTable(server.url, table="accounts")
    table.describe(("id",))
    keys = pa.RecordBatch.from_pydict({"id": [1]})
    with closing(table.open(("id",), "a lookup")) as reader:
        for _ in range(2):
            assert reader.read(keys).num_rows == 1
            killed = database.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE application_name = 'a lookup'"
            )
            assert killed.fetchall() == [(True,)]


def test_records_are_joined_once_with_the_rows_of_their_time(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    cluster: AnyCluster,
    tmp_path: Path,
) -> None:
    database.execute("CREATE TABLE limits (account text PRIMARY KEY, limited int)")
    database.execute("INSERT INTO limits SELECT n::text, 1 FROM generate_series(0, 8) AS n")
    changed = tmp_path / "changed"
    source = CountingSource(2_000, accounts=10, pause_s=0.005, ends_with=str(changed))
    pipeline, sink = begin(cluster, tmp_path), DirectorySink(str(tmp_path / "out"))
    records = pipeline.read(source, uid="records")
    table = PostgresTable(server.url, table="limits")
    records.lookup_join(table, "account", "left", ttl=0.05).write(sink, uid="out")
    # A later join with the same object does not change the columns of this one.
    database.execute("ALTER TABLE limits ADD COLUMN later int")
    begin(cluster, tmp_path).read(source, uid="records").lookup_join(table, "account")
    job = pipeline.start()
    await_checkpoint(job)
    kill_a_slot(job, 0)
    database.execute("UPDATE limits SET limited = 2; INSERT INTO limits VALUES ('9', 3)")
    changed.touch()
    job.wait(60)
    rows = sorted(sink.rows(), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(source.records))
    by_account: dict[str, list[Any]] = {}
    for row in rows:
        by_account.setdefault(row["account"], []).append(row["limited"])
    assert set(by_account["9"]) <= {None, 3}
    assert all(set(found) <= {1, 2} for name, found in by_account.items() if name != "9")
    assert {found for amounts in by_account.values() for found in amounts} >= {1, 2}


def test_a_connector_file_joins_records_with_a_table(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database.execute("CREATE TABLE owners (account text PRIMARY KEY, owner text)")
    database.execute("INSERT INTO owners VALUES ('acct-000001', 'Ada')")
    monkeypatch.setenv("SERVER", server.url)
    file = tmp_path / "named.toml"
    file.write_text(f"""
        name = "named"
        checkpointing.storage = "{tmp_path}/checkpoints"
        [sources.payments]
        connector = "datagen"
        rows = 300
        accounts = 2
        [steps.named.lookup_join]
        url = "${{env:SERVER}}"
        table = "owners"
        on = "account"
        how = "left"
        [sinks.out]
        url = "sqlite:///{tmp_path}/out.db"
        table = "out"
        create = true
    """)
    status = read_connector_file(file).build(LocalProcesses(tmp_path / "logs")).run(60)
    assert status.state is JobState.FINISHED
    with closing(sqlite3.connect(tmp_path / "out.db")) as target:
        rows = target.execute("SELECT id, account, owner FROM out ORDER BY id").fetchall()
    assert [number for number, _, _ in rows] == list(range(300))
    assert {row[1:] for row in rows} == {("acct-000000", None), ("acct-000001", "Ada")}
