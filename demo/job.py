"""The demo's driver process: builds the pipeline, runs it, and writes its status to a file.

    python -m demo.job SPEC.json

It is a program of its own so that it can be killed. Started again with the same spec, it takes the
job over where the decision log says. Exit status 0 means that the job has ended well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from demo import driver
from demo.settings import DemoCommitMode, SinkKind
from pyspark.sql import SparkSession
from typing_extensions import assert_never

from onceflow import Checkpointing, HeapBackend, Pipeline, RocksDBBackend, count, sum_
from onceflow.connectors.spark.session import session
from onceflow.core.decoding import json_decoder
from onceflow.core.settings.pipeline_settings import RuntimeSettings
from onceflow.core.spi import Sink
from onceflow.integration.workload import PAYMENT_SCHEMA
from onceflow.sinks import KafkaSink, MySQLSink, PostgresSink
from onceflow.sources import KafkaSource

_REPORT_INTERVAL_S = 0.05
_STOP_TIMEOUT_S = 120.0

_Delivery: TypeAlias = Literal["exactly_once", "at_least_once"]
_CommitMode: TypeAlias = Literal["auto", "two_phase", "ledger"]
_COMMIT_MODES: Mapping[DemoCommitMode, _CommitMode] = {
    DemoCommitMode.AUTO: "auto",
    DemoCommitMode.TWO_PHASE: "two_phase",
    DemoCommitMode.LEDGER: "ledger",
}


def build(spec: driver.JobSpec, spark: SparkSession) -> Pipeline:
    """Return the demo's pipeline: payments, keyed by account, with the balance after each."""
    delivery: _Delivery = "at_least_once" if spec.at_least_once else "exactly_once"
    pipeline = Pipeline(
        spark,
        name=driver.JOB,
        parallelism=spec.parallelism,
        checkpointing=Checkpointing(
            storage=spec.storage,
            interval=spec.interval_s,
            mode=delivery,
            unaligned=spec.unaligned,
        ),
        state_backend=RocksDBBackend() if spec.backend == "rocksdb" else HeapBackend(),
        # Fresh numbers for the progress bar and for the moments of the kills.
        settings=RuntimeSettings(heartbeat_interval_s=0.1, scratch_dir=spec.scratch),
    )
    payments = pipeline.read(
        KafkaSource(
            spec.bootstrap_servers,
            topic=spec.topic,
            format="json",
            schema=PAYMENT_SCHEMA,
            group_id=spec.group,
        ),
        uid="payments",
    )
    balances = payments.key_by("account").running(uid="balance", balance=sum_("amount"), n=count())
    balances.write(_sink(spec.sink, delivery), uid="ledger")
    return pipeline


def _sink(spec: driver.SinkSpec, delivery: _Delivery) -> Sink:
    match spec.kind:
        case SinkKind.POSTGRES:
            return _table(PostgresSink, spec, delivery)
        case SinkKind.MYSQL | SinkKind.MARIADB:
            return _table(MySQLSink, spec, delivery)
        case SinkKind.KAFKA:
            return KafkaSink(spec.address, topic=spec.target, key="account", delivery=delivery)
        case _:
            assert_never(spec.kind)


def _table(
    kind: type[PostgresSink] | type[MySQLSink], spec: driver.SinkSpec, delivery: _Delivery
) -> Sink:
    return kind(
        spec.address,
        table=spec.target,
        create=True,
        delivery=delivery,
        commit_mode=_COMMIT_MODES[spec.commit_mode],
        # At least once: rows are committed as they come, batch by batch.
        flush_rows=1,
    )


def main(spec_path: str) -> None:
    """Run the job of the spec until it is told to stop.

    Raises:
        OnceflowError: The job failed and may not be restarted.
    """
    spec = json_decoder(driver.JobSpec).decode(Path(spec_path).read_bytes())
    loopback = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    spark = session(
        spec.spark_master,
        name="onceflow demo",
        conf={**loopback, "spark.ui.enabled": "false"},
        make_archive=False,
    )
    job = build(spec, spark).start(from_savepoint=spec.from_savepoint)
    stop = Path(spec.stop_path)
    while not job.state.ended and not stop.exists():
        driver.write_status(Path(spec.status_path), job.status())
        time.sleep(_REPORT_INTERVAL_S)
    driver.write_status(Path(spec.status_path), job.stop(_STOP_TIMEOUT_S))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
