"""The source of Postgres changes keeps every clause of the contract, on a real server."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence

import psycopg
import pytest
from psycopg.rows import TupleRow

from onceflow.core.spi import Source
from onceflow.integration.conformance import SourceConformance, SourceInput
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sources import PostgresChanges

pytestmark = [pytest.mark.integration, pytest.mark.servers]


class ChangesInput(SourceInput):
    """The inserts into a table of its own, which has one split: its slot."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._url = server.url
        self._name = f"rows_{secrets.token_hex(4)}"
        self._ends: list[int] = []
        """The position in the write-ahead log after each row."""

    def fill(self, rows: int) -> Mapping[str, Sequence[object]]:
        self._execute(f"CREATE TABLE {self._name} (id int PRIMARY KEY)")
        # The slot begins here, before the rows.
        (split,) = self.source().splits()
        return {split.id: self.append(split.id, rows)}

    def source(self) -> Source:
        return PostgresChanges(
            self._url, table=self._name, slot=self._name, first_copy="none", batch_rows=2
        )

    def append(self, split_id: str, rows: int) -> Sequence[object]:
        numbers = range(len(self._ends), len(self._ends) + rows)
        with psycopg.connect(self._url, autocommit=True) as connection:
            for number in numbers:
                connection.execute(f"INSERT INTO {self._name} VALUES ({number})".encode())
                cursor = connection.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn")
                self._ends.append(_first(cursor))
        return numbers

    def count_acknowledged(self, split_id: str) -> int:
        with psycopg.connect(self._url, autocommit=True) as connection:
            confirmed = _first(
                connection.execute(
                    "SELECT confirmed_flush_lsn - '0/0'::pg_lsn FROM pg_replication_slots"
                    " WHERE slot_name = %s",
                    [self._name],
                )
            )
        return sum(end <= confirmed for end in self._ends)

    def remove_split(self, split_id: str) -> str:
        self._drop_slot()
        return self._name

    def close(self) -> None:
        self._drop_slot()
        self._execute(
            f"DROP PUBLICATION IF EXISTS {self._name}", f"DROP TABLE IF EXISTS {self._name}"
        )

    def _drop_slot(self) -> None:
        deadline = time.monotonic() + 30
        with psycopg.connect(self._url, autocommit=True) as connection:
            mine = "FROM pg_replication_slots WHERE slot_name = %s"
            while connection.execute(f"SELECT {mine} AND active".encode(), [self._name]).fetchall():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            connection.execute(
                f"SELECT pg_drop_replication_slot(slot_name) {mine}".encode(), [self._name]
            )

    def _execute(self, *statements: str) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())


def _first(cursor: psycopg.Cursor[TupleRow]) -> int:
    row = cursor.fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres({"wal_level": "logical", "max_replication_slots": "4"}) as running:
        yield running


class TablesInput(ChangesInput):
    """The inserts into two tables that share a slot, most of them in transactions over both."""

    def fill(self, rows: int) -> Mapping[str, Sequence[object]]:
        self._execute(*(f"CREATE TABLE {table} (id int PRIMARY KEY)" for table in self._tables))
        (split,) = self.source().splits()
        return {split.id: self.append(split.id, rows)}

    def source(self) -> Source:
        return PostgresChanges(
            self._url, tables=self._tables, slot=self._name, first_copy="none", batch_rows=2
        )

    def append(self, split_id: str, rows: int) -> Sequence[object]:
        keys: list[tuple[str, int]] = []
        with psycopg.connect(self._url) as connection:
            for _ in range(rows):
                number = len(self._ends) + len(keys) % 2
                table = self._tables[number % 2]
                connection.execute(f"INSERT INTO {table} VALUES ({number})".encode())
                keys.append((table, number))
                if len(keys) % 2 == 0 or len(keys) == rows:
                    connection.commit()
                    cursor = connection.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn")
                    end = _first(cursor)
                    connection.commit()
                    self._ends += [end] * (number + 1 - len(self._ends))
        return keys

    def close(self) -> None:
        super().close()
        self._execute(*(f"DROP TABLE IF EXISTS {table}" for table in self._tables))

    @property
    def _tables(self) -> Sequence[str]:
        return [f"{self._name}_a", f"{self._name}_b"]


class TestPostgresChangesOfTwoTables(SourceConformance):
    @pytest.fixture
    def source_input(self, server: EmbeddedPostgres) -> Iterator[SourceInput]:
        source_input = TablesInput(server)
        yield source_input
        source_input.close()


class TestPostgresChanges(SourceConformance):
    @pytest.fixture
    def source_input(self, server: EmbeddedPostgres) -> Iterator[SourceInput]:
        source_input = ChangesInput(server)
        yield source_input
        source_input.close()
