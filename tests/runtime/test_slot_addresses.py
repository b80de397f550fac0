"""Channels end in the slot that they are meant for, or the job says by name why not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.counting_source import CountingSource
from tests.support.ledger import SETTINGS, assert_exactly_once, ledger

from onceflow import JobState, LocalProcesses, NoRestart
from onceflow.core.errors import ConfigError, SlotLost
from onceflow.core.protocol.messages import Deploy
from onceflow.core.runtime.driver import attempt
from onceflow.core.runtime.transport.addresses import find_route_source


def test_channel_that_reaches_another_slot_than_its_own_ends_the_attempt_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_one_address(*fields: Any) -> Deploy:
        # As where two machines have one address, and their slots by chance one port.
        deploy = Deploy(*fields)
        first, _ = deploy.data_addresses
        return replace(deploy, data_addresses=(first, first))

    monkeypatch.setattr(attempt, "Deploy", at_one_address)
    source = CountingSource(500, ends_with=str(tmp_path / "ends"))
    pipeline, _ = ledger(LocalProcesses(), tmp_path, source, restart=NoRestart())
    with pytest.raises(SlotLost) as caught:
        pipeline.run(60)
    assert "to slot 1 of job" in str(caught.value)
    assert "was connected to slot 0" in str(caught.value)
    assert "RuntimeSettings(slot_host=" in str(caught.value)


@dataclass(frozen=True, slots=True)
class OtherMachines(LocalProcesses):
    """Processes that find their addresses as slots on other machines do."""

    @property
    def is_local(self) -> bool:
        return False


def test_job_runs_over_ipv6_alone(tmp_path: Path) -> None:
    if find_route_source("::1") != "::1":
        pytest.skip("this machine has no IPv6")
    source = CountingSource(500)
    settings = replace(SETTINGS, driver_host="::1", slot_host="::1", tls="auto")
    pipeline, sink = ledger(OtherMachines(), tmp_path, source, settings=settings)
    assert pipeline.run(90).state is JobState.FINISHED
    assert_exactly_once(sink, source)


@pytest.mark.parametrize(
    ("slot_host", "text"),
    [("127.0.1.1", "listens at 127.0.1.1, a loopback address"), ("203.0.113.1", "cannot listen")],
)
def test_slot_at_an_address_that_is_no_way_to_its_machine_is_refused(
    tmp_path: Path, slot_host: str, text: str
) -> None:
    # 203.0.113.0/24 is for documents: no packet leaves, and a route to it names our own address.
    driver_host = find_route_source("203.0.113.1")
    if driver_host is None:
        pytest.skip("this machine is in no network")
    settings = replace(SETTINGS, driver_host=driver_host, slot_host=slot_host)
    pipeline, _ = ledger(OtherMachines(), tmp_path, CountingSource(10), settings=settings)
    with pytest.raises(ConfigError, match=text):
        pipeline.run(60)
