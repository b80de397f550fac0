"""Postgres beside binary COPY."""

from __future__ import annotations

import pgpq
import psycopg
from typing_extensions import override

from benchmarks.sinks.alone import Clock, Loaded
from benchmarks.sinks.rows import SCHEMA, Rows
from benchmarks.sinks.sql import DatabasePlace
from benchmarks.stage import Stage
from onceflow.sinks import PostgresSink

_CREATE = """
    CREATE TABLE ledger (
        id bigint NOT NULL, account text NOT NULL, amount bigint NOT NULL, ts bigint NOT NULL,
        balance bigint NOT NULL, n bigint NOT NULL
    )
"""


class PostgresPlace(DatabasePlace):
    """The place of Postgres."""

    name = "Postgres"
    bare = "COPY, binary"
    sink = PostgresSink

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "postgres")

    @override
    def load_bare(self, address: str, rows: Rows) -> Loaded:
        encoder = pgpq.ArrowToPostgresBinaryEncoder(SCHEMA)
        with psycopg.connect(address) as connection:
            connection.execute(_CREATE)
            connection.commit()
            with Clock() as clock:
                with connection.cursor().copy("COPY ledger FROM STDIN (FORMAT binary)") as copy:
                    copy.write(encoder.write_header())
                    for batch in rows.batches:
                        copy.write(encoder.write_batch(batch))
                    copy.write(encoder.finish())
                connection.commit()
        return Loaded(rows.count, clock.seconds, clock.cpu_s)

    @override
    def _totals(self, address: str) -> tuple[int, ...]:
        with psycopg.connect(address) as connection:
            cursor = connection.execute(
                "SELECT count(*), sum(n)::bigint, sum(balance)::bigint FROM ledger"
            )
            return cursor.fetchone() or ()
