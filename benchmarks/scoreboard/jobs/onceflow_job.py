"""The driver process of onceflow's contestant: `python -m … SPEC.json`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import pyarrow as pa

from onceflow import (
    Checkpointing,
    FixedDelay,
    HeapBackend,
    LocalProcesses,
    Pipeline,
    RuntimeSettings,
    count,
    sum_,
)
from onceflow.core.runtime.cluster.local_processes import fork_own_host
from onceflow.integration.workload import PAYMENT_SCHEMA
from onceflow.sinks import PostgresSink
from onceflow.sources import KafkaSource

_LOOK_S = 0.1
_TOTALS = pa.schema(
    [
        pa.field("account", pa.string(), nullable=False),
        pa.field("total", pa.int64()),
        pa.field("n", pa.int64()),
    ]
)


class JobSpec(msgspec.Struct, frozen=True):
    bootstrap_servers: str
    topic: str
    url: str
    storage: str
    scratch: str
    pids: str
    """The file with the pids of the slots."""


def build(spec: JobSpec) -> Pipeline:
    """Return the pipeline: payments into one table, running totals into another."""
    pipeline = Pipeline(
        LocalProcesses(),
        name="scoreboard",
        parallelism=2,
        checkpointing=Checkpointing(storage=spec.storage, interval=1.0),
        state_backend=HeapBackend(),
        restart=FixedDelay(attempts=10_000, delay_s=1.0),
        settings=RuntimeSettings(heartbeat_timeout_s=10.0, scratch_dir=spec.scratch),
    )
    payments = pipeline.read(
        KafkaSource(spec.bootstrap_servers, topic=spec.topic, schema=PAYMENT_SCHEMA),
        uid="payments",
    )
    payments.write(PostgresSink(spec.url, table="payments"), uid="payments-table")
    totals = payments.key_by("account").running(uid="total", total=sum_("amount"), n=count())
    totals.map_batches(_take_totals, schema=_TOTALS, uid="columns").write(
        PostgresSink(spec.url, table="totals", write_mode="upsert", primary_key=("account",)),
        uid="totals-table",
    )
    return pipeline


def _take_totals(rows: pa.RecordBatch) -> pa.RecordBatch:
    columns = [rows.column(name).cast(_TOTALS.field(name).type) for name in _TOTALS.names]
    return pa.record_batch(columns, schema=_TOTALS)


def main(path: str) -> None:
    """Run the job until it fails for good or another driver has taken it over.

    Raises:
        OnceflowError: The job failed and may not be restarted.
    """
    fork_own_host()
    spec = msgspec.json.decode(Path(path).read_bytes(), type=JobSpec)
    job = build(spec).start()
    pids = Path(spec.pids)
    while not job.state.ended:
        fresh = pids.with_suffix(".new")
        fresh.write_text(" ".join(str(slot.pid) for slot in job.status().slots))
        fresh.replace(pids)
        time.sleep(_LOOK_S)
    job.wait(60.0)


if __name__ == "__main__":
    main(sys.argv[1])
