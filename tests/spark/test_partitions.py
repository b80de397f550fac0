"""A network that is cut between two slots while both still reach the driver, and a frozen slot."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink

from onceflow import (
    Checkpointing,
    NoRestart,
    Pipeline,
    RuntimeSettings,
    count,
    sum_,
)
from onceflow.core.api.pipeline import Job
from onceflow.core.errors import SlotLost
from onceflow.core.protocol.messages import Deploy
from onceflow.core.protocol.restart import RestartStrategy
from onceflow.core.runtime.driver import attempt
from onceflow.integration.faults.network import TcpProxy

pytestmark = pytest.mark.spark


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TcpProxy]]:
    """Stands before slot 1: the channels of the others to it go through these, one an attempt."""
    proxies: list[TcpProxy] = []

    def routed(*fields: Any) -> Deploy:
        deploy = Deploy(*fields)
        host, port = deploy.data_addresses[1].removeprefix("grpc://").split(":")
        proxy = TcpProxy(host, int(port))
        proxies.append(proxy)
        addresses = (deploy.data_addresses[0], f"grpc://{host}:{proxy.port}")
        return replace(deploy, data_addresses=addresses)

    monkeypatch.setattr(attempt, "Deploy", routed)
    yield proxies
    for proxy in proxies:
        proxy.close()


def started(
    spark: SparkSession,
    directory: Path,
    source: CountingSource,
    *,
    interval: float | None,
    restart: RestartStrategy,
) -> Job:
    pipeline = Pipeline(
        spark,
        name="ledger",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=interval),
        restart=restart,
        settings=RuntimeSettings(
            heartbeat_interval_s=0.2, heartbeat_timeout_s=2.0, cancel_timeout_s=8.0
        ),
    )
    records = pipeline.read(source, uid="records").key_by("account")
    balances = records.running(balance=sum_("amount"), n=count(), uid="balance")
    balances.write(DirectorySink(str(directory / "out")), uid="ledger")
    return pipeline.start()


def test_slots_that_are_cut_off_from_each_other_end_the_attempt_by_name(
    spark: SparkSession, tmp_path: Path, network: list[TcpProxy]
) -> None:
    """No checkpoint is ever due, so nothing else would notice."""
    source = CountingSource(10_000, pause_s=0.01, endless=True)
    job = started(spark, tmp_path, source, interval=None, restart=NoRestart())
    job.wait_for(records=500)
    for proxy in network:
        proxy.pause()
    cut = time.monotonic()
    with pytest.raises(SlotLost, match=r"slot 1 is lost: channel balance\[1\] from 0 has had no"):
        job.wait(90)
    assert time.monotonic() - cut < 60
