"""The table whose changes are read, the load that changes it, and a slot for each reader."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from onceflow.integration.servers import EmbeddedPostgres

TABLE, PUBLICATION = "changes", "bench_changes"
_OF_TRANSACTION = 100
"""Changes of one transaction: 60 inserts, 30 updates and 10 deletes."""
_SETTINGS = {"wal_level": "logical", "max_replication_slots": "64", "max_wal_senders": "64"}
_CREATE = f"""
    CREATE TABLE {TABLE} (id bigint PRIMARY KEY, account text NOT NULL, amount bigint NOT NULL,
                          at timestamptz NOT NULL, note text);
    CREATE PUBLICATION {PUBLICATION} FOR TABLE {TABLE};
    CREATE PROCEDURE load(transactions int) LANGUAGE plpgsql AS $$
    BEGIN
      FOR t IN 0..transactions - 1 LOOP
        INSERT INTO {TABLE}
          SELECT t * 60 + i, 'account-' || (i * 7919 + t) % 1000, i * 37, now(),
                 CASE WHEN i % 5 = 0 THEN NULL ELSE 'note ' || i END
          FROM generate_series(0, 59) i;
        UPDATE {TABLE} SET amount = amount + 1 WHERE id >= t * 60 AND id < t * 60 + 30;
        DELETE FROM {TABLE} WHERE id >= t * 60 + 50 AND id < t * 60 + 60;
        COMMIT;
      END LOOP;
    END $$
"""


def changes_server() -> EmbeddedPostgres:
    """Return a server whose changes can be read by many slots."""
    return EmbeddedPostgres(_SETTINGS)


def load(url: str, changes: int, slots: Sequence[str]) -> tuple[int, str]:
    """Create the table and `slots`, and change the table.

    Returns:
        The number of changes, and the end of the log after the last one.
    """
    transactions = max(1, changes // _OF_TRANSACTION)
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in _CREATE.split(";\n    CREATE"):
            prefix = "" if "CREATE" in statement.split("(")[0] else "CREATE"
            connection.execute((prefix + statement).encode())
        for slot in slots:
            connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        connection.execute("CALL load(%s)", [transactions])
        connection.execute("CHECKPOINT")
        row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
        assert row is not None
    return transactions * _OF_TRANSACTION, str(row[0])


def count_rows(url: str) -> int:
    """Return the number of rows in the table."""
    with psycopg.connect(url) as connection:
        row = connection.execute(f"SELECT count(*) FROM {TABLE}".encode()).fetchone()
        assert row is not None
    return int(row[0])
