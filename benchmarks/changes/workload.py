"""The table whose changes are read, its load, a slot for each reader, and tables to copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

_COPIES = {
    "copied": """
        (id bigint PRIMARY KEY, account text NOT NULL, amount bigint NOT NULL,
         at timestamptz NOT NULL, note text)
        SELECT i, 'account-' || (i * 7919) % 1000, i * 37, now(),
               CASE WHEN i % 5 = 0 THEN NULL ELSE 'note ' || i % 60 END
    """,
    "copied_wide": """
        (id bigint PRIMARY KEY, number uuid NOT NULL, price numeric(12, 2), discount numeric(18, 4),
         ordered timestamptz, changed timestamp, due date, customer text, street varchar(40),
         remark text, detail jsonb, weight float8, quantity int, is_paid boolean)
        SELECT i, gen_random_uuid(), (i % 100000) / 7.0, i / 13.0,
               now() + i * interval '1 second', now(), current_date + (i % 400)::int,
               'customer ' || i, 'street ' || i % 977, repeat('x', (i % 80)::int),
               jsonb_build_object('a', i, 'b', 'text'), i / 3.0, i, i % 2 = 0
    """,
}
"""The tables that are copied: the columns, and the rows by their number i."""
_WIDE_SHARE = 5
"""A wide row takes about five times as long as another one."""


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


def load_copies(url: str, rows: int) -> Mapping[str, int]:
    """Create the tables that are copied, and return the number of rows in each.

    The rows are frozen, so that the first reader does not write to them.
    """
    counts: dict[str, int] = {}
    with psycopg.connect(url, autocommit=True) as connection:
        for table, description in _COPIES.items():
            counts[table] = rows if table == "copied" else max(1, rows // _WIDE_SHARE)
            columns, select = description.split("SELECT", 1)
            numbers = f"generate_series(1::bigint, {counts[table]}) AS i"
            for statement in (
                f"CREATE TABLE {table} {columns}",
                f"INSERT INTO {table} SELECT {select} FROM {numbers}",
                f"VACUUM (FREEZE, ANALYZE) {table}",
            ):
                connection.execute(statement.encode())
        connection.execute("CHECKPOINT")
    return counts
