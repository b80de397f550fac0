"""A small job on Spark into a SQLite file, whose slots are killed, and the proof that all is there.

    python examples/killed_job.py

Payments are generated, balances are kept for each account, and the newest row of each account is in
the file. Two slots get SIGKILL in the middle. Afterwards every account is counted anew from the
payments themselves. Exits with 1 when a row is wrong.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# So that this process and Spark's can import the sink by its name.
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

from examples.own_sink import OwnSink  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402

from onceflow import Checkpointing, FixedDelay, Job, Pipeline, count, sum_  # noqa: E402
from onceflow.sources import DatagenSource, GeneratedPayments  # noqa: E402

PAYMENTS = 30_000
ACCOUNTS = 50
KILLS = 2


def main() -> int:
    """Run the job, kill its slots, compare; return the exit status."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/balances.db"
        spark = _spark()
        try:
            job = _pipeline(spark, directory, path).start()
            for kill in range(KILLS):
                _kill_a_slot(job, kill)
            status = job.wait(120)
        finally:
            spark.stop()
        print(f"finished after {status.restores} restores")
        return _prove(path)


def _spark() -> SparkSession:
    builder = SparkSession.builder.master("local[2]").config("spark.log.level", "OFF")
    quiet = builder.config("spark.ui.showConsoleProgress", "false")
    return quiet.config("spark.ui.enabled", "false").getOrCreate()


def _pipeline(spark: SparkSession, directory: str, path: str) -> Pipeline:
    pipeline = Pipeline(
        spark,
        name="balances",
        parallelism=2,
        checkpointing=Checkpointing(storage=f"{directory}/checkpoints", interval="200 ms"),
        restart=FixedDelay(attempts=10, delay_s=0.0),
    )
    source = DatagenSource(PAYMENTS, splits_count=2, accounts=ACCOUNTS, rows_per_second=10_000)
    payments = pipeline.read(source, uid="payments")
    balances = payments.key_by("account").running(balance=sum_("amount"), n=count(), uid="balance")
    balances.write(OwnSink(path, table="balances", key="account"), uid="sqlite")
    return pipeline


def _kill_a_slot(job: Job, kill: int) -> None:
    """Kill a slot once two more checkpoints are complete; wait until the job goes on."""
    before = job.status().checkpoints_completed
    while job.status().checkpoints_completed < before + 2 and not job.status().state.ended:
        time.sleep(0.01)
    slots = job.status().slots
    if slots:
        victim = slots[kill % len(slots)]
        print(f"kill -9 {victim.pid}  (slot {victim.slot}, after checkpoint {before + 2})")
        os.kill(victim.pid, signal.SIGKILL)
    while job.status().restores <= kill and not job.status().state.ended:
        time.sleep(0.01)


def _prove(path: str) -> int:
    """Count every account anew and compare; print what was found."""
    payments = GeneratedPayments(seed=0, accounts=ACCOUNTS).batch(
        np.arange(PAYMENTS, dtype=np.int64)
    )
    expected: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for payment in payments.to_pylist():
        balance, n = expected[payment["account"]]
        expected[payment["account"]] = (balance + payment["amount"], n + 1)
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute('SELECT account, balance, n FROM "balances"').fetchall()
        proofs = db.execute("SELECT count(*), max(checkpoint_id) FROM ledger").fetchone()
    wrong = [row for row in rows if expected[row[0]] != row[1:]]
    print(f"ledger: {proofs[0]} proofs kept, the last of checkpoint {proofs[1]}")
    print(f"{sum(row[2] for row in rows)} payments counted of {PAYMENTS}")
    print(f"{len(rows)} accounts of {len(expected)}, {len(wrong)} with a wrong balance")
    return int(bool(wrong) or len(rows) != len(expected))


if __name__ == "__main__":
    sys.exit(main())
