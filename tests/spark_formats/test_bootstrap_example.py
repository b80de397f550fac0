"""The example of a job that begins with a table: its balances are those of table and payments."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from examples.bootstrap import balances, write_savepoint
from pyspark.sql import SparkSession
from tests.support.counting_source import CountingSource, amount_of
from tests.support.directory_sink import DirectorySink

from onceflow import JobState, LocalProcesses, connectors

ACCOUNTS, RECORDS, KNOWN = 100, 2_000, 60


def opening(account: int) -> tuple[int, int, int]:
    """Balance, payments and overdraft of an account as the table says; some it does not know."""
    return (1_000 * account, 10, account % 3 * 500) if account < KNOWN else (0, 0, 0)


@pytest.mark.spark
def test_balances_go_on_from_those_of_a_table(spark: SparkSession, tmp_path: Path) -> None:
    connectors.register(spark)
    accounts = spark.createDataFrame(
        [(str(account), *opening(account)) for account in range(KNOWN)],
        "account STRING, balance BIGINT, payments BIGINT, overdraft BIGINT",
    ).coalesce(1)
    savepoint, sink = str(tmp_path / "opening"), DirectorySink(str(tmp_path / "out"))
    write_savepoint(accounts, savepoint)
    source = CountingSource(RECORDS, splits_count=1, accounts=ACCOUNTS)
    storage = str(tmp_path / "checkpoints")
    job = balances(LocalProcesses(tmp_path / "logs"), source, sink, storage)
    status = job.start(from_savepoint=savepoint).wait(90)
    assert status.state is JobState.FINISHED, status.last_error
    rows = sorted(sink.rows(), key=lambda row: int(row["id"]))
    assert [row["id"] for row in rows] == list(range(RECORDS))
    so_far = defaultdict[int, int](int)
    for number, row in enumerate(rows):
        account = number % ACCOUNTS
        balance, payments, overdraft = opening(account)
        so_far[account] += amount_of(number)
        assert row["balance"] == balance + so_far[account]
        assert row["payments"] == payments + number // ACCOUNTS + 1
        assert row["within"] == (row["balance"] >= -overdraft)
    assert {row["within"] for row in rows} == {True, False}
