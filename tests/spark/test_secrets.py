"""Tests that secrets reach slots over the control stream only, and not through Spark's records."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import SparkSession
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS, ledger

from onceflow import Checkpointing, JobState, Pipeline, RocksDBBackend
from onceflow.core.errors import UserFunctionError
from onceflow.core.plan.functions import Record
from onceflow.core.runtime.cluster import spark as spark_cluster
from onceflow.core.runtime.slot.context import AttemptPlan
from onceflow.core.runtime.transport import credentials
from onceflow.core.runtime.transport.credentials import new_token

pytestmark = pytest.mark.spark

PASSWORD = "correct horse battery staple"


@dataclass(frozen=True)
class SecretSource(CountingSource):
    password: str = field(default="", repr=False)


@dataclass(frozen=True)
class SecretSink(DirectorySink):
    password: str = field(default="", repr=False)


@pytest.fixture
def sent_by_spark(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Everything that is pickled for Spark's executors while the test runs."""
    sent: list[bytes] = []
    dumps = cast("Any", CloudPickleSerializer).dumps

    def recording(self: CloudPickleSerializer, value: Any) -> bytes:
        sent.append(dumps(self, value))
        return sent[-1]

    monkeypatch.setattr(CloudPickleSerializer, "dumps", recording)
    return sent


def test_no_password_of_a_source_sink_or_function_is_in_what_spark_carries(
    spark: SparkSession, tmp_path: Path, sent_by_spark: list[bytes]
) -> None:
    sink = SecretSink(str(tmp_path / "out"), password=PASSWORD)
    password = PASSWORD
    pipeline = Pipeline(
        spark,
        name="secrets",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
        settings=SETTINGS,
    )
    records = pipeline.read(SecretSource(500, password=PASSWORD), uid="records")
    records.filter(lambda record: password == PASSWORD).write(sink, uid="out")
    assert pipeline.run(60).state is JobState.FINISHED
    assert len(sink.rows()) == 500
    assert any(b"AttemptPlan" in data for data in sent_by_spark)
    assert not any(PASSWORD.encode() in data for data in sent_by_spark)


def test_files_of_a_running_job_are_its_owners_alone(spark: SparkSession, tmp_path: Path) -> None:
    endless = CountingSource(10_000, pause_s=0.005, ends_with=str(tmp_path / "never"))
    pipeline, _ = ledger(spark, tmp_path, endless, backend=RocksDBBackend(incremental=True))
    job = pipeline.start()
    try:
        while job.status().checkpoints_completed < 3:
            assert not job.state.ended, job.status().last_error
            time.sleep(0.01)
        storage = tmp_path / "checkpoints"
        kept = [path for path in (storage, *storage.rglob("*")) if path.exists()]
        assert len(kept) > 10
        assert [path for path in kept if path.exists() and path.stat().st_mode & 0o077] == []
    finally:
        job.cancel()


def test_the_attempts_token_and_key_are_in_no_log_line_status_or_stage(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG, logger="onceflow")
    tokens: list[str] = []
    plans: list[AttemptPlan] = []

    def recording_token() -> str:
        tokens.append(new_token())
        return tokens[-1]

    def recording_body(plan: AttemptPlan) -> Any:
        plans.append(plan)
        return slot_body(plan)

    slot_body = cast("Any", spark_cluster)._slot_body
    monkeypatch.setattr(credentials, "new_token", recording_token)
    monkeypatch.setattr(spark_cluster, "_slot_body", recording_body)

    def fail(record: Record) -> Record:
        if record["id"] == 77:
            raise ValueError("no such record")
        return record

    pipeline = Pipeline(
        spark,
        name="quiet",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
        settings=replace(SETTINGS, tls="on"),
    )
    records = pipeline.read(CountingSource(500), uid="records").map(fail)
    records.write(DirectorySink(str(tmp_path / "out")), uid="out")
    job = pipeline.start()
    with pytest.raises(UserFunctionError) as raised:
        job.wait(60)
    tracker: Any = spark.sparkContext.statusTracker()
    jobs = [tracker.getJobInfo(one) for one in tracker.getJobIdsForGroup("onceflow-quiet-3")]
    stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
    assert stages
    assert len(tokens) == len(plans) == 3
    captured = capfd.readouterr()
    said = repr((plans, stages, job.status(), raised.value, caplog.text, captured))
    assert "AttemptPlan(" in said
    assert "restart in" in said
    for secret in (*tokens, "PRIVATE KEY", "BEGIN CERTIFICATE"):
        assert secret not in said


def test_a_program_of_many_megabytes_reaches_every_slot(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = bytes(range(256)) * 100_000
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = Pipeline(
        spark,
        name="large",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
        settings=SETTINGS,
    )
    records = pipeline.read(CountingSource(500), uid="records")
    records.filter(lambda record: table[int(record["id"])] < 100).write(sink, uid="out")
    assert pipeline.run(60).state is JobState.FINISHED
    assert len(sink.rows()) == 2 * 100
