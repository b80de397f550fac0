"""Jobs into Kafka whose slots begin commits early: killed there, or kept waiting."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.integration import kafka_sink_kit
from tests.support.counting_source import CountingSource
from tests.support.ledger import SETTINGS
from tests.support.scripted_sink import ScriptedSink
from tests.support.waiting import await_true

from onceflow import Checkpointing, FixedDelay, Job, JobState, LocalProcesses, Pipeline, count
from onceflow.core.crash_points import VARIABLE, CrashPoint
from onceflow.core.spi import Sink
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sinks import KafkaSink

_TIMEOUT_S = 60
_SOURCE = CountingSource(10_000, batch_rows=10, pause_s=0.05)
"""25 s of input; the tests end it when they have done what they do."""


def wait_while_told(directory: Path, *_: object) -> None:
    """Wait while the file `waits` is there; make the file `waiting`."""
    while (directory / "waits").exists():
        (directory / "waiting").touch()
        time.sleep(0.01)


def build_pipeline(
    directory: Path, source: CountingSource, sink: KafkaSink, other: Sink | None = None
) -> Pipeline:
    """Build source -> count by account -> topic, and into `other`, if there is one."""
    pipeline = Pipeline(
        LocalProcesses(),
        name="early",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )
    records = pipeline.read(source, uid="records")
    counted = records.key_by("account").running(n=count(), uid="counted")
    counted.write(sink, uid="topic")
    if other is not None:
        counted.write(other, uid="other")
    return pipeline


def assert_exactly_once_in_order(servers: str, topic: str, source: CountingSource) -> None:
    """Each row is there once, and those of an account in their order."""
    values = kafka_sink_kit.values_of(kafka_sink_kit.messages(servers, topic))
    assert sorted(value["id"] for value in values) == list(range(source.records))
    numbers: dict[str, list[int]] = defaultdict(list)
    for value in values:
        numbers[value["account"]].append(value["n"])
    assert all(found == list(range(1, len(found) + 1)) for found in numbers.values())


def has_restored(job: Job, times: int) -> bool:
    """Return whether `job` has been restored so often."""
    return job.status().restores >= times


@pytest.mark.only_proof
@pytest.mark.parametrize(
    "point",
    ["begun", *(pytest.param(one, marks=pytest.mark.servers) for one in ("commit", "committed"))],
)
def test_a_slot_that_dies_between_a_begun_commit_and_its_end_doubles_and_loses_no_row(
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: CrashPoint,
) -> None:
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic(2)
    points = tmp_path / "crash points"
    points.mkdir()
    monkeypatch.setenv(VARIABLE, str(points))
    source = replace(_SOURCE, ends_with=str(tmp_path / "killed"))
    job = build_pipeline(tmp_path, source, KafkaSink(servers, topic=topic, key="account")).start()
    job.wait_for(checkpoints=3)
    for restores in (1, 2):
        (points / point).touch()
        await_true(lambda: not (points / point).exists())
        await_true(partial(has_restored, job, restores))
        job.wait_for(checkpoints=3 * (restores + 1))
    (tmp_path / "killed").touch()
    assert job.wait(_TIMEOUT_S).state is JobState.FINISHED
    assert_exactly_once_in_order(servers, topic, source)
    for partition in (0, 1):
        assert not kafka_sink_kit.open_transaction_blocks(servers, topic, partition)


@pytest.mark.only_proof
def test_a_decision_that_is_late_keeps_no_transaction_open(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    """Readers wait for what is begun, but not until another sink is ready."""
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic(2)
    out = tmp_path / "out"
    slow = ScriptedSink(str(out), {"pre_commit": partial(wait_while_told, out)})
    source = replace(_SOURCE, ends_with=str(tmp_path / "decided"))
    sink = KafkaSink(servers, topic=topic, key="account")
    job = build_pipeline(tmp_path, source, sink, slow).start()
    job.wait_for(checkpoints=3)
    (tmp_path / "out" / "waits").touch()
    await_true((tmp_path / "out" / "waiting").exists)
    decided = job.status().checkpoints_completed
    await_true(
        lambda: any(kafka_sink_kit.open_transaction_blocks(servers, topic, one) for one in (0, 1))
    )
    assert kafka_sink_kit.await_markers(servers, topic, timeout_s=_TIMEOUT_S)
    assert job.status().checkpoints_completed == decided, "it is still not decided"
    before = kafka_sink_kit.ids_in(servers, topic)
    assert len(before) < len(kafka_sink_kit.ids_in(servers, topic, isolation="read_uncommitted"))
    (tmp_path / "out" / "waits").unlink()
    (tmp_path / "decided").touch()
    assert job.wait(_TIMEOUT_S).state is JobState.FINISHED
    assert_exactly_once_in_order(servers, topic, source)
    assert sorted(row["id"] for row in slow.rows()) == list(range(source.records))
