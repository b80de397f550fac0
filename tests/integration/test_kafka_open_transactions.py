"""A transaction that another producer leaves open holds a job's reader, and the status says so."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.integration.kafka_feed import Transactions, produce, record, source
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS
from typer.testing import CliRunner

from onceflow import Checkpointing, LocalProcesses, Pipeline
from onceflow.cli.main import app
from onceflow.core.runtime.driver import source_lag
from onceflow.integration.conformance.processes import eventually
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer


@pytest.mark.only_proof
def test_an_open_transaction_that_holds_the_reader_is_named_until_it_ends(
    tmp_path: Path,
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_lag, "LAG_INTERVAL_S", 0.1)
    monkeypatch.setattr(source_lag, "HELD_S_MIN", 0.3)
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic(2)
    other = Transactions(servers)
    produce(servers, topic, map(record, range(5)), partition=1)
    other.write(topic, map(record, range(5, 8)), partition=1)
    produce(servers, topic, map(record, range(8, 20)), partition=1)
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = Pipeline(
        LocalProcesses(),
        name="held",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
        settings=SETTINGS,
    )
    pipeline.read(source(servers, topic), uid="payments").write(sink, uid="out")
    began_s = time.time()
    job = pipeline.start()
    try:
        assert eventually(lambda: bool(job.status().waits), 60), job.status()
        (wait,) = job.status().waits
        assert wait.uid == "payments"
        assert began_s < wait.since_s < time.time()
        assert servers in wait.what
        assert f"{topic}-1" in wait.what
        assert "last stable offset 5 of 20" in wait.what
        assert "find-hanging" in wait.what
        assert job.status().lag == {"payments": 15}
        assert f"payments is waiting for {wait.what}, since" in job.status().describe()
        asked = ["status", "held", "--storage", str(tmp_path / "checkpoints"), "--json"]
        told = json.loads(CliRunner().invoke(app, asked).output)
        assert [one["what"] for one in told["waits"]] == [wait.what]
        assert len(sink.rows()) == 5
        other.commit()
        assert eventually(lambda: len(sink.rows()) == 20, 60)
        assert eventually(lambda: not job.status().waits and not job.status().lag["payments"], 60)
    finally:
        job.cancel()
