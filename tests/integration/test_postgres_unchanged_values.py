"""Large values that updates leave as they were and do not send: the target keeps them."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import TupleRow
from tests.integration import postgres_sink_kit as postgres
from tests.integration.postgres_changes_kit import (
    CONTEXT,
    drop_slots,
    open_database,
    read_rows,
    source_of,
    wait_until,
)
from tests.support.driver_process import DriverProcess

from onceflow.core.errors import BadRecord
from onceflow.integration.faults import processes
from onceflow.integration.servers.postgres import EmbeddedPostgres

_LARGE = 100_000
_DIGEST = """
    SELECT count(*), md5(coalesce(string_agg(md5(row(id, a, b, n)::text), '' ORDER BY id), ''))
    FROM {}
"""
_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    settings = {"wal_level": "logical", "max_prepared_transactions": "20"}
    with EmbeddedPostgres(settings) as running:
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with open_database(server) as connection:
        yield connection
        # Each job is another one, and the tables of its sink refuse others of its name.
        connection.execute("DROP SCHEMA IF EXISTS onceflow CASCADE")


def _create(database: psycopg.Connection[TupleRow], key: str = "int") -> None:
    database.execute(f"CREATE TABLE t (id {key} PRIMARY KEY, a text, b bytea, n int)".encode())
    for column in ("a", "b"):
        database.execute(f"ALTER TABLE t ALTER {column} SET STORAGE EXTERNAL".encode())


def test_an_update_names_the_columns_that_it_did_not_send(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    _create(database)
    source = source_of(server, metadata=["_unchanged", "_table"])
    database.execute("INSERT INTO t VALUES (1, repeat('x', 9000), repeat('y', 9000)::bytea, 1)")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        (copied,) = read_rows(reader, 1)
        assert copied["_unchanged"] is None
        database.execute("INSERT INTO t VALUES (2, 'small', NULL, 2)")
        database.execute("UPDATE t SET n = 3")
        database.execute("UPDATE t SET a = NULL WHERE id = 1")
        database.execute("DELETE FROM t WHERE id = 1")
        facts = [
            (row["id"], row["_op"], row["a"], row["b"], row["n"], row["_unchanged"])
            for row in read_rows(reader, 5)
        ]
    assert facts == [
        (2, "c", "small", None, 2, None),
        (1, "u", None, None, 3, ["a", "b"]),
        (2, "u", "small", None, 3, None),
        (1, "u", None, None, 3, ["b"]),
        (1, "d", None, None, None, None),
    ]


def test_a_large_value_of_the_key_that_was_not_sent_is_that_of_the_old_key(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """The row is over 2 kB, so its key is stored apart, though it fits into the index."""
    _create(database, key="text")
    database.execute("ALTER TABLE t ALTER id SET STORAGE EXTERNAL")
    source = source_of(server, first_copy="none", metadata=["_unchanged"])
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        key = "k" * 2500
        database.execute("INSERT INTO t VALUES (%s, 'a', NULL, 1)", [key])
        database.execute("UPDATE t SET n = 2")
        inserted, updated = read_rows(reader, 2)
    assert inserted["id"] == key
    assert updated == {
        "id": key, "a": "a", "b": None, "n": 2, "_op": "u", "_unchanged": None
    }  # fmt: skip


def test_a_changed_key_needs_every_large_value(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """Without a value that was not sent, the target has no row with the new key to keep it."""
    _create(database)
    source = source_of(server, first_copy="none", metadata=["_unchanged"])
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, repeat('x', 9000), NULL, 1)")
        read_rows(reader, 1)
        before = reader.snapshot()
        database.execute("UPDATE t SET id = 2")
        with pytest.raises(BadRecord, match="changed the key .* large value of column 'a'"):
            read_rows(reader, 1)
        assert reader.snapshot() == before
        # The error advises this setting for later changes.
        database.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    drop_slots(database)
    later = source_of(server, metadata=["_unchanged"])
    with contextlib.closing(later.reader(later.splits(), CONTEXT)) as reader:
        read_rows(reader, 1)
        database.execute("UPDATE t SET id = 3")
        _, moved = read_rows(reader, 2)
    assert (moved["id"], moved["a"], moved["_unchanged"]) == (3, "x" * 9000, None)


class LargeRows:
    """A program that changes rows with texts of 100 kB, most of them in other columns."""

    def __init__(self, url: str, seed: int) -> None:
        self._url, self._random = url, random.Random(seed)
        self._over = threading.Event()
        self.transactions = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with psycopg.connect(self._url) as connection:
            while not self._over.is_set():
                for _ in range(self._random.randrange(1, 5)):
                    self._change(connection, self._random.randrange(40))
                connection.commit()
                self.transactions += 1
                time.sleep(0.005)

    def _change(self, connection: psycopg.Connection[Any], key: int) -> None:
        roll, number = self._random.random(), self._random.randrange(1000)
        if roll < 0.6:
            connection.execute("UPDATE original SET n = %s WHERE id = %s", [number, key])
        elif roll < 0.75:
            column = self._random.choice("ab")
            connection.execute(
                f"UPDATE original SET {column} = repeat(%s, 5000) WHERE id = %s".encode(),
                [f"{number:03}:" * 5, key],
            )
        elif roll < 0.8:
            connection.execute("UPDATE original SET a = NULL WHERE id = %s", [key])
        elif roll < 0.9:
            connection.execute("DELETE FROM original WHERE id = %s", [key])
        else:
            connection.execute(
                "INSERT INTO original VALUES (%s, repeat(%s, %s), 'small', 0)"
                " ON CONFLICT (id) DO UPDATE SET n = excluded.n",
                [key, "0123456789", _LARGE // 10],
            )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["two_phase", "ledger"])
@pytest.mark.parametrize("seed", [1, 2])
def test_tables_with_large_texts_are_equal_after_updates_of_other_columns_and_kills(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    tmp_path: Path,
    mode: str,
    seed: int,
) -> None:
    columns = "(id bigint PRIMARY KEY, a text, b text, n int)"
    postgres.query(
        server.url,
        f"CREATE TABLE original {columns}",
        f"CREATE TABLE copy {columns}",
        *(f"ALTER TABLE original ALTER {column} SET STORAGE EXTERNAL" for column in ("a", "b")),
        f"INSERT INTO original SELECT i, repeat('0123456789', {_LARGE // 10}), 'b', i"
        " FROM generate_series(0, 29) i",
    )
    driver = DriverProcess(tmp_path)
    arguments: list[str | Path] = [tmp_path, "--url", server.url, "--keeps", mode]

    def launch() -> None:
        driver.launch("tests.support.changes_job_process", arguments, {})

    load = LargeRows(server.url, seed)
    draw = random.Random(seed)
    try:
        launch()
        for kill in range(3):
            before = _decided(database)
            wait_until(lambda before=before: _decided(database) not in ("", before))  # type: ignore[misc]
            time.sleep(draw.uniform(0.0, 0.4))
            if kill % 2 == 0:
                for slot in processes.children_of(driver.pid):
                    processes.kill_process(slot)
            else:
                driver.kill()
                launch()
        load.stop()
        expected = postgres.query(server.url, _DIGEST.format("original"))
        deadline = time.monotonic() + _TIMEOUT_S
        while postgres.query(server.url, _DIGEST.format("copy")) != expected:
            assert time.monotonic() < deadline, driver.log_tail()
            assert driver.exit_status is None, driver.log_tail()
            time.sleep(0.1)
    finally:
        load.stop()
        driver.end()
    assert load.transactions > 50


def _decided(database: psycopg.Connection[TupleRow]) -> str:
    """Return the slot's position, which moves after decisions alone; empty without a slot."""
    query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots"
    positions = database.execute(query).fetchall()
    return str(positions[0][0]) if positions else ""
