"""MySQL and MariaDB beside LOAD DATA LOCAL."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pymysql
from pyarrow import csv
from typing_extensions import override

from benchmarks.sinks.alone import Clock, Loaded
from benchmarks.sinks.rows import SCHEMA, Rows
from benchmarks.sinks.sql import DatabasePlace
from benchmarks.stage import Stage
from onceflow.integration.servers.mysql import MySQLAdmin
from onceflow.sinks import MySQLSink

_CREATE = """
    CREATE TABLE ledger (
        id bigint NOT NULL, account varchar(255) NOT NULL, amount bigint NOT NULL,
        ts bigint NOT NULL, balance bigint NOT NULL, n bigint NOT NULL
    )
"""
# In memory, where there is such a file system: a disk is no part of the load.
_SHARED_MEMORY = Path("/dev/shm")


class MySQLPlace(DatabasePlace):
    """The place of MySQL or MariaDB."""

    bare = "LOAD DATA LOCAL"
    sink = MySQLSink

    def __init__(self, stage: Stage, kind: Literal["mysql", "mariadb"]) -> None:
        super().__init__(stage, kind)
        self.name = "MySQL" if kind == "mysql" else "MariaDB"

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
    def _totals(self, address: str) -> tuple[int, ...]:
        with MySQLAdmin.session(address) as session:
            (found,) = session.rows("SELECT COUNT(*), SUM(n), SUM(balance) FROM ledger")
        return tuple(map(int, found))
