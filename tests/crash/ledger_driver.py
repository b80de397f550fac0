"""A driver process that runs ledgers on its cluster, one after another, until it is killed.

    python -m tests.crash.ledger_driver DIRECTORY MASTER

DIRECTORY/jobs/NAME.json is a job to run; it is deleted once the job has ended, so a driver that is
started after a crash goes on with the job of the one before. DIRECTORY/status/NAME.json says how
the job stands, as of a moment ago. Starting Spark takes longer than a job: hence many a process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import pyarrow as pa
from tests.support.clusters import AnyCluster

from onceflow import (
    Checkpointing,
    FixedDelay,
    HeapBackend,
    JobStatus,
    LocalProcesses,
    OnceflowError,
    Pipeline,
    RocksDBBackend,
    RuntimeSettings,
    count,
    sum_,
)
from onceflow.core.runtime.cluster.local_processes import fork_own_host
from onceflow.integration.workload import PAYMENT_SCHEMA, Payments
from onceflow.sinks import PostgresSink
from onceflow.sources import KafkaSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Backend = Literal["heap", "rocksdb"]
Mode = Literal["exactly_once", "at_least_once"]
CommitMode = Literal["two_phase", "ledger"]

PAYMENTS = Payments(records=60_000, accounts=2_000, partitions=2, seed=20)
LOCAL_PROCESSES = "processes"
"""In place of a Spark master: slots are processes of this machine."""
READY = "ready"
"""The file that says that a driver's session has started."""
PARALLELISM = 2
TABLE = "ledger"
SINK_UID = "ledger"
# All decisions are kept: the audit compares every one of them with what is visible.
_RETAINED = 1_000
_LOOK_S = 0.02


@dataclass(frozen=True)
class LedgerSpec:
    """One job: payments from Kafka, each account's running balance, every row to Postgres."""

    job: str
    bootstrap_servers: str
    topic: str
    postgres_url: str
    storage: str
    released: str
    """The stream trickles until this file exists, so that no fault comes too late."""
    trickle_s: float = 0.02
    """What each batch of 200 records takes until then."""
    backend: Backend = "heap"
    mode: Mode = "exactly_once"
    commit_mode: CommitMode = "two_phase"
    interval_s: float = 0.2
    restart_delay_s: float = 0.05
    parallelism: int = PARALLELISM
    overtaking: bool = False
    """Barriers overtake the rows that wait in all channels: it trickles behind the exchange."""


@dataclass(frozen=True)
class LedgerStatus:
    """The last report of the driver about a job."""

    state: str
    ended: bool
    driver: int
    """The driver process."""
    attempt: int
    restores: int
    """Restarts by this driver."""
    restored_checkpoint: int
    """What the running attempt began with."""
    checkpoints: int
    in_flight_bytes: int
    """In the checkpoints that the running attempt has completed, together."""
    slots: tuple[tuple[int, int], ...]
    """Of each slot the pid, and that of the daemon that forked it, a child of the executor."""
    error: str


def build(spec: LedgerSpec, cluster: AnyCluster) -> Pipeline:
    """Return the pipeline that `spec` describes."""
    pipeline = Pipeline(
        cluster,
        name=spec.job,
        parallelism=spec.parallelism,
        checkpointing=Checkpointing(
            storage=spec.storage,
            interval=spec.interval_s,
            mode=spec.mode,
            retained=_RETAINED,
            unaligned=spec.overtaking,
        ),
        state_backend=RocksDBBackend() if spec.backend == "rocksdb" else HeapBackend(),
        restart=FixedDelay(attempts=60, delay_s=spec.restart_delay_s),
        settings=RuntimeSettings(
            start_timeout_s=120, heartbeat_interval_s=0.2, heartbeat_timeout_s=15
        ),
    )
    payments = pipeline.read(
        KafkaSource(
            spec.bootstrap_servers,
            topic=spec.topic,
            schema=PAYMENT_SCHEMA,
            ending_offsets="latest",
            batch_rows=200,
            # Little is fetched ahead: what a dead broker has not handed out is really missing.
            options={"queued.min.messages": 500, "fetch.message.max.bytes": 50_000},
        ),
        uid="payments",
    )
    trickling = _trickling(spec.released, spec.trickle_s)
    if not spec.overtaking:
        payments = payments.map_batches(trickling, uid="trickle")
    balances = payments.key_by("account").running(balance=sum_("amount"), n=count(), uid="balance")
    if spec.overtaking:
        balances = balances.map_batches(trickling, uid="trickle")
    balances.write(
        PostgresSink(
            spec.postgres_url,
            table=TABLE,
            create=True,
            delivery=spec.mode,
            commit_mode=spec.commit_mode,
        ),
        uid=SINK_UID,
    )
    return pipeline


def _trickling(released: str, trickle_s: float) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    def trickle(rows: pa.RecordBatch) -> pa.RecordBatch:
        if not os.path.exists(released):  # noqa: PTH110 - once a batch
            time.sleep(trickle_s)
        return rows

    return trickle


def main(directory: Path, master: str) -> None:
    """Run whatever job appears, for as long as this process lives."""
    if master == LOCAL_PROCESSES:
        fork_own_host()
    cluster = LocalProcesses() if master == LOCAL_PROCESSES else _session(master)
    (directory / READY).touch()
    while True:
        for path in sorted((directory / "jobs").glob("*.json")):
            spec = msgspec.json.decode(path.read_bytes(), type=LedgerSpec)
            _run(spec, cluster, directory / "status" / path.name)
            path.unlink()
        time.sleep(_LOOK_S)


def _session(master: str) -> SparkSession:
    from pyspark.sql import SparkSession

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    return (
        SparkSession.Builder()
        .master(master)
        .appName("ledger")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
        .config("spark.python.daemon.module", "onceflow.connectors.python_daemon")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
        .getOrCreate()
    )


def _run(spec: LedgerSpec, cluster: AnyCluster, status: Path) -> None:
    job = build(spec, cluster).start()
    while True:
        try:
            job.wait(_LOOK_S)
        except TimeoutError:
            _publish(job.status(), status)
            continue
        except OnceflowError:
            pass  # The status has it.
        _publish(job.status(), status)
        return


def _publish(status: JobStatus, path: Path) -> None:
    said = LedgerStatus(
        state=status.state.value,
        ended=status.state.ended,
        driver=os.getpid(),
        attempt=status.attempt,
        restores=status.restores,
        restored_checkpoint=status.attempts[-1].restored_checkpoint if status.attempts else 0,
        checkpoints=status.checkpoints_completed,
        in_flight_bytes=sum(
            one.in_flight_bytes for one in status.history if one.attempt == status.attempt
        ),
        slots=tuple((slot.pid, slot.parent_pid) for slot in status.slots),
        error=status.last_error,
    )
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(msgspec.json.encode(said))
    fresh.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
