"""Postgres beside binary COPY."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import pgpq
import psycopg
from typing_extensions import override

from benchmarks.sinks.alone import Clock, Loaded
from benchmarks.sinks.place import Effect, Place, Way
from benchmarks.sinks.rows import SCHEMA, Rows
from benchmarks.stage import BenchmarkError, Stage
from onceflow.integration.oracle import verify
from onceflow.sinks import PostgresSink

_CREATE = """
    CREATE TABLE ledger (
        id bigint NOT NULL, account text NOT NULL, amount bigint NOT NULL, ts bigint NOT NULL,
        balance bigint NOT NULL, n bigint NOT NULL
    )
"""


class PostgresPlace(Place):
    """Databases of the stage's server."""

    name = "Postgres"
    bare = "COPY, binary"

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    @property
    @override
    def ways(self) -> Mapping[str, Way]:
        return {
            "insert, two_phase": Way(_insert_two_phase, ratio_min=0.7, commit_ms_max=50),
            "insert, ledger": Way(_insert_ledger),
            "upsert, two_phase": Way(_upsert_two_phase, Effect.LAST_OF_EACH_ACCOUNT),
            "upsert, ledger": Way(_upsert_ledger, Effect.LAST_OF_EACH_ACCOUNT),
        }

    @override
    def empty(self) -> AbstractContextManager[str]:
        return self._stage.database("postgres")

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
    def verify(self, address: str, rows: Rows, effect: Effect) -> None:
        match effect:
            case Effect.EVERY_ROW:
                verdict = verify(address, "ledger", rows.payments)
                if not verdict.ok:
                    raise BenchmarkError(f"the table in {self.name} is wrong: {verdict}")
            case Effect.LAST_OF_EACH_ACCOUNT:
                with psycopg.connect(address) as connection:
                    cursor = connection.execute(
                        "SELECT count(*), sum(n)::bigint, sum(balance)::bigint FROM ledger"
                    )
                    found = cursor.fetchone()
                if found != rows.latest:
                    raise BenchmarkError(
                        f"the table in {self.name} has (rows, n, balance) {found}, "
                        f"not {rows.latest}"
                    )


def _insert_two_phase(url: str) -> PostgresSink:
    return PostgresSink(url, table="ledger", create=True, commit_mode="two_phase")


def _insert_ledger(url: str) -> PostgresSink:
    return PostgresSink(url, table="ledger", create=True, commit_mode="ledger")


def _upsert_two_phase(url: str) -> PostgresSink:
    return PostgresSink(
        url,
        table="ledger",
        create=True,
        commit_mode="two_phase",
        write_mode="upsert",
        primary_key=("account",),
    )


def _upsert_ledger(url: str) -> PostgresSink:
    return PostgresSink(
        url,
        table="ledger",
        create=True,
        commit_mode="ledger",
        write_mode="upsert",
        primary_key=("account",),
    )
