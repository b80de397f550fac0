"""Changes a table in transactions while a job follows it, and keeps a journal of the changes.

A transaction writes its changes into the journal, too. So the journal has exactly what was
committed, whatever happened to the server and to the connection.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import psycopg
from tests.chaos.input_writer import InputWriter, Pace
from tests.chaos.job import TABLE
from tests.chaos.model import Change, Record
from tests.chaos.schedule import Schedule
from typing_extensions import override

_Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

INITIAL_ROWS = 200
"""The rows that the table has before the job starts."""
_STEP_S = 0.02
_RECONNECT_S = 0.1
_CHANGES_MAX = 40
"""The changes of the largest transaction."""
_CREATE = f"""
    CREATE TABLE {TABLE} (id bigint PRIMARY KEY, account text, amount bigint, ts bigint);
    ALTER TABLE {TABLE} REPLICA IDENTITY FULL;
    CREATE TABLE journal (
        ts bigint PRIMARY KEY, operation text, id bigint, account text, amount bigint
    )
"""
_JOURNAL = "INSERT INTO journal (ts, operation, id, account, amount) VALUES (%s, %s, %s, %s, %s)"
_DROP_SLOTS = """
    SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
    WHERE database = current_database()
"""


def draw_changes(schedule: Schedule) -> Sequence[Change]:
    """Return the rows that the table begins with, and the changes after them. The last adds a row.

    The column `ts` of a row is the number of its change, except after a delete.
    """
    rng = random.Random(f"changes {schedule.seed}")
    rows: list[Record] = []
    changes: list[Change] = []
    last = INITIAL_ROWS + schedule.records - 1
    for number in range(last + 1):
        operation = rng.choices("cud", (5, 4, 1))[0]
        if number < INITIAL_ROWS or number == last or not rows:
            operation = "r" if number < INITIAL_ROWS else "c"
        row = Record(number, f"a{number % schedule.accounts}", rng.randrange(1_000), number)
        if operation in "ud":
            at = rng.randrange(len(rows))
            old, rows[at] = rows[at], rows[-1]
            rows.pop()
            row = Record(old.id, old.account, row.amount, number) if operation == "u" else old
        if operation != "d":
            rows.append(row)
        changes.append(Change(operation, row))
    return changes


def create_table(url: str, changes: Sequence[Change]) -> None:
    """Create the table with its first rows, and the journal."""
    with psycopg.connect(url) as connection:
        connection.execute(_CREATE)
        _apply(connection, changes, 0, INITIAL_ROWS)


def drop_slots(url: str) -> None:
    """Drop the replication slots of a database whose job is over: a server has only a few.

    What cannot be dropped stays, and later schedules tell if there are too many.
    """
    with suppress(psycopg.Error), psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots"
            " WHERE database = current_database() AND active"
        )
        connection.execute(_DROP_SLOTS)


class Changing(InputWriter):
    """Makes the changes of a table whose first rows are there."""

    def __init__(self, url: str, changes: Sequence[Change], pace: Pace) -> None:
        """Take the changes. Entering the context begins."""
        super().__init__(pace)
        self._url = url
        self._changes = changes
        self._random = random.Random(f"transactions {len(changes)}")

    @override
    def _write(self) -> None:
        began = time.monotonic()
        done = INITIAL_ROWS
        while done < len(self._changes) and not self._abandoned.wait(_RECONNECT_S):
            # The server is killed, and its connections are cut.
            with (
                suppress(psycopg.OperationalError),
                psycopg.connect(self._url, autocommit=True, connect_timeout=5) as connection,
            ):
                # A commit whose reply was lost may have happened.
                done = _count_changes(connection)
                while done < len(self._changes) and not self._abandoned.wait(_STEP_S):
                    done = self._make_due_changes(connection, done, time.monotonic() - began)

    def _make_due_changes(self, connection: _Connection, done: int, elapsed_s: float) -> int:
        made = INITIAL_ROWS
        made += int((len(self._changes) - made) * self._pace.find_due_part(elapsed_s))
        while done < made and not self._abandoned.is_set():
            end = min(made, done + self._random.randint(1, _CHANGES_MAX))
            with connection.transaction():
                _apply(connection, self._changes, done, end)
            done = end
        return done


def _count_changes(connection: _Connection) -> int:
    row = connection.execute("SELECT count(*) FROM journal").fetchone()
    assert row is not None
    return int(row[0])


def _apply(connection: _Connection, changes: Sequence[Change], begin: int, end: int) -> None:
    with connection.pipeline():
        for number in range(begin, end):
            operation, row = changes[number].operation, changes[number].record
            values = (number, operation, row.id, row.account, row.amount)
            connection.execute(_JOURNAL, values)
            if operation == "d":
                connection.execute(f"DELETE FROM {TABLE} WHERE id = %s", [row.id])
            else:
                connection.execute(
                    f"INSERT INTO {TABLE} VALUES (%s, %s, %s, %s) ON CONFLICT (id)"
                    " DO UPDATE SET amount = excluded.amount, ts = excluded.ts",
                    [row.id, row.account, row.amount, row.ts],
                )
