"""MySQL and MariaDB beside LOAD DATA LOCAL."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pymysql
from pyarrow import csv
from typing_extensions import override

from benchmarks.sinks.alone import Clock, Loaded
from benchmarks.sinks.place import Effect, Place, Way
from benchmarks.sinks.rows import SCHEMA, Rows
from benchmarks.stage import BenchmarkError, Stage
from onceflow.integration.oracle import verify
from onceflow.integration.servers.mysql_admin import MySQLAdmin
from onceflow.sinks import MySQLSink

_CREATE = """
    CREATE TABLE ledger (
        id bigint NOT NULL, account varchar(255) NOT NULL, amount bigint NOT NULL,
        ts bigint NOT NULL, balance bigint NOT NULL, n bigint NOT NULL
    )
"""
# In memory, where there is such a file system: a disk is no part of the load.
_SHARED_MEMORY = Path("/dev/shm")


class MySQLPlace(Place):
    """Databases of one of the stage's servers."""

    bare = "LOAD DATA LOCAL"

    def __init__(self, stage: Stage, kind: Literal["mysql", "mariadb"]) -> None:
        self._stage = stage
        self._kind: Literal["mysql", "mariadb"] = kind
        self.name = "MySQL" if kind == "mysql" else "MariaDB"

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
        return self._stage.database(self._kind)

    @override
    def load_bare(self, address: str, rows: Rows) -> Loaded:
        parts = urlsplit(address)
        memory = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        with (
            tempfile.TemporaryDirectory(dir=memory) as directory,
            closing(
                pymysql.connect(
                    host=parts.hostname,
                    port=parts.port or 3306,
                    user=parts.username,
                    password=unquote(parts.password or ""),
                    database=parts.path.lstrip("/"),
                    charset="utf8mb4",
                    local_infile=True,
                )
            ) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(_CREATE)
            path = Path(directory) / "rows.csv"
            with Clock() as clock:
                csv.write_csv(
                    pa.Table.from_batches(rows.batches, SCHEMA),
                    path,
                    csv.WriteOptions(include_header=False, quoting_style="none"),
                )
                cursor.execute(
                    f"LOAD DATA LOCAL INFILE '{path}' INTO TABLE ledger "
                    "CHARACTER SET utf8mb4 FIELDS TERMINATED BY ','"
                )
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
                with MySQLAdmin.session(address) as session:
                    (found,) = session.rows("SELECT COUNT(*), SUM(n), SUM(balance) FROM ledger")
                if tuple(map(int, found)) != rows.latest:
                    raise BenchmarkError(
                        f"the table in {self.name} has (rows, n, balance) {found}, "
                        f"not {rows.latest}"
                    )


def _insert_two_phase(url: str) -> MySQLSink:
    return MySQLSink(url, table="ledger", create=True, commit_mode="two_phase")


def _insert_ledger(url: str) -> MySQLSink:
    return MySQLSink(url, table="ledger", create=True, commit_mode="ledger")


def _upsert_two_phase(url: str) -> MySQLSink:
    return MySQLSink(
        url,
        table="ledger",
        create=True,
        commit_mode="two_phase",
        write_mode="upsert",
        primary_key=("account",),
    )


def _upsert_ledger(url: str) -> MySQLSink:
    return MySQLSink(
        url,
        table="ledger",
        create=True,
        commit_mode="ledger",
        write_mode="upsert",
        primary_key=("account",),
    )
