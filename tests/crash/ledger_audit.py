"""Compares, at any moment of a run, what is visible in the table with what the log has decided.

I1 at the level of the whole pipeline: in every snapshot of the database, the visible rows are those
of the transactions in the ledger, and each of these is listed by a decision. Scenarios S13 and S14.
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from tests.crash.ledger_driver import SINK_UID, TABLE, LedgerSpec

from onceflow import FileSystemStorage

# One statement, hence one snapshot.
_VISIBLE = f"""
    SELECT (SELECT count(*) FROM {TABLE}),
           coalesce(sum(row_count), 0)::bigint,
           coalesce(array_agg(transaction_id::text), '{{}}')
    FROM onceflow.onceflow_ledger
"""
_IN_DOUBT = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"


@dataclass(frozen=True)
class Visible:
    """The database in one snapshot."""

    rows: int
    transactions: frozenset[str]


class Audit:
    """Looks at one exactly-once run; every method asserts what must always hold."""

    def __init__(self, spec: LedgerSpec) -> None:
        self._spec = spec
        self.looks = 0

    def look(self) -> None:
        """Assert that nothing is visible which no decision lists."""
        with psycopg.connect(self._spec.postgres_url) as connection:
            (exists,) = connection.execute(
                "SELECT to_regclass('onceflow.onceflow_ledger') IS NOT NULL"
                f" AND to_regclass('{TABLE}') IS NOT NULL"
            ).fetchone() or (False,)
        if exists:
            self.visible()

    def visible(self) -> Visible:
        """Return what is visible, after the assertions of `look`."""
        with psycopg.connect(self._spec.postgres_url) as connection:
            row = connection.execute(_VISIBLE).fetchone()
        assert row is not None
        rows, ledger_rows, transactions = row
        # Read after the table: what is visible must have been decided by then.
        decided = self.decided()
        assert rows == ledger_rows
        assert set(transactions) <= decided.keys()
        assert rows == sum(decided[name] for name in transactions)
        self.looks += 1
        return Visible(rows, frozenset(transactions))

    def decided(self) -> dict[str, int]:
        """Return the rows of every transaction that any decision lists."""
        view = FileSystemStorage(self._spec.storage).open(self._spec.job).log.read()
        return {
            str(committable.transaction): committable.rows
            for completed in view.completed
            for _, snapshot in completed.operator(SINK_UID)
            for committable in snapshot.committables
        }

    def in_flight_bytes(self, checkpoint: int) -> int:
        """Return the size of the rows that the barrier of `checkpoint` overtook."""
        view = FileSystemStorage(self._spec.storage).open(self._spec.job).log.read()
        (completed,) = (one for one in view.completed if one.checkpoint == checkpoint)
        return sum(
            one.handle.size_bytes for snapshot in completed.snapshots for one in snapshot.in_flight
        )

    def in_doubt(self) -> frozenset[str]:
        """Return the transactions that are prepared and neither committed nor rolled back."""
        with psycopg.connect(self._spec.postgres_url) as connection:
            return frozenset(name for (name,) in connection.execute(_IN_DOUBT).fetchall())
