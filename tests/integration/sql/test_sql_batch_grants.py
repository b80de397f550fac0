"""Tests that errors about missing privileges of Spark's writes and reads have the GRANT."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sql.databases import Database
from tests.spark_formats.batches import driver_of

from onceflow.connectors.spark.options.sql_reads import MYSQL_READ, POSTGRES_READ
from onceflow.connectors.spark.readers.sql import RowSource
from onceflow.core.errors import ConfigError
from onceflow.core.storage.staging.staged_rows import FileStagingArea

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("made_by_owner", [True, False], ids=["tables-there", "schema-alone"])
def test_a_user_who_writes_batches_is_told_each_grant_until_nothing_is_missing(
    database: Database, tmp_path: Path, made_by_owner: bool
) -> None:
    database.query("CREATE TABLE ledger (id bigint PRIMARY KEY, account text, amount bigint)")
    with database.new_schema("books") as books, database.user("SELECT, INSERT ON ledger") as user:
        database.query(f"CREATE SCHEMA {books}")
        settings = {"table": "ledger", "commit_mode": "ledger", "ledger_schema": books}
        if made_by_owner:
            one = driver_of(database.sink(**settings), tmp_path)
            staging = FileStagingArea.in_directory(str(tmp_path), "others")
            named: Any = {"sink_id": "others", "owner": "another job", "source": "others"}
            other = replace(one, target=replace(one.target, **named, staging=staging))
            other.batch(0, [0])
        driver = driver_of(user.sink(**settings), tmp_path)
        told: list[str] = []
        for _ in range(6):
            try:
                driver.batch(0, [1, 2])
                break
            except ConfigError as error:
                told.append(str(error))
            for statement in re.split(r"Run[^:]*: |; ", told[-1]):
                if statement.startswith(("GRANT ", "CREATE ")):
                    database.query(statement)
        assert told
        assert len(set(told)) == len(told), "each statement fixed what it was said for"
        assert database.query("SELECT count(*) FROM ledger WHERE id > 0") == [(2,)]


def test_a_user_who_reads_is_told_the_grant(database: Database) -> None:
    database.query("CREATE TABLE ledger (id bigint PRIMARY KEY)", "CREATE TABLE other (id bigint)")
    database.query("INSERT INTO ledger VALUES (7)")

    def read(source: RowSource) -> list[int]:
        columns = source.columns()
        statement = f"SELECT {columns[0].expression} AS id FROM {source.relation}"
        batches = source.batches(statement, columns, "")
        return [int(value) for batch in batches for value in batch["id"].to_pylist()]

    with database.user("SELECT ON other") as user:
        table = POSTGRES_READ if user.url.startswith("postgres") else MYSQL_READ
        source = table.make({"url": user.url, "dbtable": "ledger"}).source
        with pytest.raises(ConfigError, match=": GRANT SELECT ON") as told:
            read(source)
        database.query(f"GRANT {str(told.value).rpartition(': GRANT ')[2]}")
        assert read(source) == [7]
