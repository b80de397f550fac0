"""A program that changes a table in random transactions while the table's changes are read.

It uses what databases see every day, and what readers of changes have got wrong: rows that move to
another key, savepoints that are rolled back, transactions that are prepared and committed later,
transactions that overlap, large values that an update leaves alone, rewrites of the table, and
columns that come and go. Every update gives its row another content, so that a change that is
applied twice can be told.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import psycopg

ROWS = 300
"""The number of keys of each of the three ranges: overlapping transactions wait for no lock."""
SCHEMA = "id BIGINT, v STRING, n DECIMAL(10, 2), big STRING"
_LARGE_BYTES = 9_000
_DDL = (
    "ALTER TABLE original ADD COLUMN IF NOT EXISTS plain int DEFAULT 5",
    "ALTER TABLE original DROP COLUMN IF EXISTS plain",
    # These two write the whole table anew.
    "ALTER TABLE original ADD COLUMN IF NOT EXISTS other uuid DEFAULT gen_random_uuid()",
    "VACUUM FULL original",
    "ALTER TABLE original DROP COLUMN IF EXISTS other",
    "ALTER TABLE original SET (fillfactor = 70)",
    "CREATE INDEX IF NOT EXISTS by_v ON original (v); DROP INDEX by_v",
)


def replay(changes: Iterable[Mapping[str, Any]]) -> dict[int, tuple[Any, ...]]:
    """Return the rows of `original` after `changes`, by key.

    Fails unless each change fits the row before it, which a change that is there twice, or not at
    all, does not.
    """
    rows: dict[int, tuple[Any, ...]] = {}
    for change in changes:
        key, operation = change["id"], change["_op"]
        row = change["v"], change["n"], change["big"]
        if operation == "d":
            assert rows.pop(key, None) is not None, f"{key} is deleted and was not there"
            continue
        assert operation not in "rc" or key not in rows, f"{key} is inserted and was there"
        assert rows.get(key) != row, f"{key} is changed to what it was"
        rows[key] = row
    return rows


def create_original(url: str) -> None:
    """Create the table `original` with rows in every other key of the first range."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE original (id bigint PRIMARY KEY, v text, n numeric(10, 2), big text)"
        )
        connection.execute("ALTER TABLE original ALTER big SET STORAGE EXTERNAL")
        connection.execute("ALTER TABLE original REPLICA IDENTITY FULL")
        connection.execute(
            "INSERT INTO original SELECT 2 * i, 'copied', i / 3.0, repeat('x', 3000)"
            " FROM generate_series(0, %s) AS i",
            [3 * ROWS // 2 - 1],
        )


class RandomLoad:
    """The program. Its transactions depend on the seed alone, and their interleaving on time."""

    def __init__(self, url: str, seed: int) -> None:
        self._url, self._seed = url, seed
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self.transactions = 0
        self._content = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """End the program, and every transaction that it has prepared."""
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        with psycopg.connect(self._url, autocommit=True) as connection:
            self._end_prepared(connection)

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                # The server is killed, too.
                with contextlib.suppress(psycopg.OperationalError):
                    self._run_until_cut()
                time.sleep(0.05)
        except BaseException as error:
            self._failure = error

    def _run_until_cut(self) -> None:
        with (
            psycopg.connect(self._url) as first,
            psycopg.connect(self._url) as second,
            psycopg.connect(self._url, autocommit=True) as third,
        ):
            while not self._over.is_set():
                self._end_prepared(third)
                self._prepare(third)
                self._change(second, ROWS)
                for _ in range(self._random.randrange(4)):
                    self._change(first, 0)
                    self._end(first)
                self._end(second)
                if self._random.random() < 0.05:
                    self._end_prepared(third)
                    third.execute("SET lock_timeout = '300ms'")
                    with contextlib.suppress(psycopg.errors.LockNotAvailable):
                        third.execute(self._random.choice(_DDL))
                time.sleep(0.002)

    def _end(self, connection: psycopg.Connection[Any]) -> None:
        if self._random.random() < 0.1:
            connection.rollback()
        else:
            connection.commit()
        self.transactions += 1

    def _prepare(self, connection: psycopg.Connection[Any]) -> None:
        if self._random.random() < 0.3:
            connection.execute("BEGIN")
            self._change(connection, 2 * ROWS)
            connection.execute(f"PREPARE TRANSACTION 'load {self.transactions}'".encode())

    def _end_prepared(self, connection: psycopg.Connection[Any]) -> None:
        listed = "SELECT gid FROM pg_prepared_xacts WHERE gid LIKE 'load %'"
        for (gid,) in connection.execute(listed).fetchall():
            end = "ROLLBACK" if self._random.random() < 0.2 else "COMMIT"
            connection.execute(f"{end} PREPARED '{gid}'".encode())
            self.transactions += 1

    def _change(self, connection: psycopg.Connection[Any], base: int) -> None:
        for _ in range(self._random.randrange(1, 6)):
            connection.execute("SAVEPOINT outer_one")
            self._change_row(connection, base)
            if self._random.random() < 0.3:
                connection.execute("SAVEPOINT inner_one")
                self._change_row(connection, base)
                if self._random.random() < 0.5:
                    connection.execute("ROLLBACK TO SAVEPOINT inner_one")
            if self._random.random() < 0.2:
                connection.execute("ROLLBACK TO SAVEPOINT outer_one")

    def _change_row(self, connection: psycopg.Connection[Any], base: int) -> None:
        key, other = (base + self._random.randrange(ROWS) for _ in range(2))
        self._content += 1
        content = f"{self._seed}.{self._content}"
        roll = self._random.random()
        if roll < 0.35:
            connection.execute(
                "INSERT INTO original (id, v, n, big) VALUES (%s, %s, %s, repeat(%s, %s))"
                " ON CONFLICT (id) DO UPDATE SET v = excluded.v, n = excluded.n",
                [key, content, self._content, "y", _LARGE_BYTES],
            )
        elif roll < 0.55:
            connection.execute("DELETE FROM original WHERE id = %s", [key])
        elif roll < 0.75:
            connection.execute(
                "UPDATE original SET id = %s WHERE id = %s"
                " AND NOT EXISTS (SELECT FROM original WHERE id = %s)",
                [other, key, other],
            )
        elif roll < 0.9:
            connection.execute("UPDATE original SET v = %s WHERE id = %s", [content, key])
        else:
            connection.execute(
                "UPDATE original SET v = %s, big = repeat(%s, %s) WHERE id = %s",
                [content, "z", self._random.randrange(_LARGE_BYTES), key],
            )
        if self._random.random() < 0.05:
            connection.execute("SELECT pg_logical_emit_message(true, 'app', %s)", [content])
