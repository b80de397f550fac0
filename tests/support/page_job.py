"""A job to look at in a browser, in a process of its own: it runs until it is stopped.

    python -m tests.support.page_job DIRECTORY [--port P] [--rows-per-second R] [--parallelism N]

While DIRECTORY/mistake is there, the user's function raises, so the job restarts again and again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pyarrow as pa

from onceflow import (
    Checkpointing,
    Endpoint,
    FixedDelay,
    LocalProcesses,
    Pipeline,
    RuntimeSettings,
    count,
    sum_,
)
from onceflow.core.runtime.cluster.local_processes import fork_own_host
from onceflow.sinks import FileSink, SQLiteSink
from onceflow.sources import DatagenSource

ROWS_PER_S = 3_000
"""Enough for curves that look alive."""


def check_currency(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Stand for a user's function that has a mistake while the file says so."""
    if os.path.exists(os.environ["PAGE_JOB_MISTAKE"]):  # noqa: PTH110 - what a user would write
        raise ValueError("no exchange rate for currency 'XAU'")
    return batch


def build(directory: Path, port: int, rows_per_s: int, parallelism: int) -> Pipeline:
    """Return payments, checked, with the balance after each, and a raw copy in files."""
    pipeline = Pipeline(
        LocalProcesses(),
        name="payments",
        parallelism=parallelism,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval="500 ms"),
        restart=FixedDelay(attempts=1_000, delay_s=1.0),
        settings=RuntimeSettings(heartbeat_interval_s=0.5, heartbeat_timeout_s=60),
        endpoint=Endpoint(port=port),
    )
    source = DatagenSource(
        rows=50_000_000, accounts=500, rows_per_second=rows_per_s, batch_rows=100, splits_count=4
    )
    payments = pipeline.read(source, uid="payments")
    payments.write(FileSink(str(directory / "archive")), uid="archive")
    balances = (
        payments.map_batches(check_currency, uid="check-currency")
        .key_by("account")
        .running(balance=sum_("amount"), n=count(), uid="balance")
    )
    balances.write(
        SQLiteSink(f"sqlite:///{directory}/bank.db", table="ledger", create=True), uid="ledger"
    )
    return pipeline


def main() -> None:
    """Run until the job is stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rows-per-second", type=int, default=ROWS_PER_S)
    parser.add_argument("--parallelism", type=int, default=2)
    arguments = parser.parse_args()
    fork_own_host()
    os.environ["PAGE_JOB_MISTAKE"] = str(arguments.directory / "mistake")
    pipeline = build(
        arguments.directory, arguments.port, arguments.rows_per_second, arguments.parallelism
    )
    pipeline.run()


if __name__ == "__main__":
    main()
