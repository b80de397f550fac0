"""A job that begins with what a table says: opening balances become its state, payments go on.

The table is any DataFrame of Spark: of a warehouse, or of the system that the job replaces.

    python examples/bootstrap.py /tmp/bootstrap
"""

from __future__ import annotations

import sys

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from onceflow import (
    Checkpointing,
    KeyedFunction,
    LocalProcesses,
    Pipeline,
    Record,
    StateAccess,
    ValueStateDescriptor,
    connectors,
    count,
    session,
    sum_,
)
from onceflow.connectors import Sink, Source
from onceflow.sinks import FileSink
from onceflow.sources import DatagenSource

JOB = "accounts"


def write_savepoint(accounts: DataFrame, savepoint: str) -> None:
    """Make a savepoint of a table with columns account, balance, payments and overdraft.

    One write a state, each to an operator's `uid`: its running aggregates, and a value state.
    """
    balances = accounts.select("account", "balance", "payments")
    balances.write.format("onceflow-savepoint").mode("append").options(
        job=JOB,
        uid="balances",
        key="account",
        stateType="running",
        aggregates="balance=sum,payments=count",
    ).save(savepoint)
    overdrafts = accounts.where("overdraft > 0")
    overdrafts.write.format("onceflow-savepoint").mode("append").options(
        job=JOB, uid="checked", state="overdraft", key="account", value="overdraft"
    ).save(savepoint)


class WithinOverdraft(KeyedFunction):
    """Tells of each payment whether the balance after it is within the account's overdraft."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Return the input's columns and `within`."""
        return input_schema.append(pa.field("within", pa.bool_()))

    def open(self, state: StateAccess) -> None:
        """Take hold of the account's overdraft, which the table has told."""
        self.overdraft = state.value_state(ValueStateDescriptor("overdraft", int, default=0))

    def process(self, record: Record) -> Record:
        """Compare the balance with it."""
        return record | {"within": record["balance"] >= -self.overdraft.get()}


def balances(
    cluster: SparkSession | LocalProcesses, payments: Source, target: Sink, storage: str
) -> Pipeline:
    """Describe the job; it is the same whether it begins from a savepoint or from nothing."""
    pipeline = Pipeline(
        cluster,
        name=JOB,
        parallelism=2,
        checkpointing=Checkpointing(storage=storage, interval="500 ms"),
    )
    paid = pipeline.read(payments, uid="payments").key_by("account")
    running = paid.running(balance=sum_("amount"), payments=count(), uid="balances")
    checked = running.key_by("account").process(WithinOverdraft(), uid="checked")
    checked.write(target, uid="out")
    return pipeline


def main(directory: str) -> None:
    """Run it over generated payments."""
    spark = session("local[2]")
    connectors.register(spark)
    try:
        accounts = spark.range(100).selectExpr(
            "format_string('acct-%06d', id) AS account",
            "1000 * id AS balance",
            "10 AS payments",
            "id % 3 * 500 AS overdraft",
        )
        savepoint = f"{directory}/opening"
        write_savepoint(accounts, savepoint)
        payments = DatagenSource(rows=10_000, splits_count=2, accounts=100)
        target = FileSink(f"{directory}/balances")
        job = balances(spark, payments, target, f"{directory}/checkpoints")
        print(job.start(from_savepoint=savepoint).wait())
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
