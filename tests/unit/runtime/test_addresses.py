"""The address at which a slot is reached, on machines of every kind."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from onceflow.core.errors import ConfigError
from onceflow.core.runtime.transport.addresses import (
    find_route_source,
    find_slot_host,
    leads_to_loopback,
    read_network_id,
    to_location,
)
from onceflow.core.runtime.transport.credentials import Credentials
from onceflow.core.runtime.transport.data_plane import DataServer, SlotIdentity

DRIVER = "grpc+tls://127.0.0.1:4000"


def _machine(monkeypatch: pytest.MonkeyPatch, names: Mapping[str, Sequence[str]]) -> None:
    """Have this machine be called "worker", and `names` resolve as they do there."""

    def getaddrinfo(host: str, port: object, **_: Any) -> list[Any]:
        addresses = names.get(host, [host] if host[0].isdigit() or ":" in host else [])
        if not addresses:
            raise socket.gaierror(f"{host} is not known")
        return [(0, 0, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "gethostname", lambda: "worker")
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    ("resolved", "host"),
    [
        (["10.0.0.7"], "10.0.0.7"),
        (["127.0.1.1", "10.0.0.7"], "10.0.0.7"),
        (["fe80::1", "2001:db8::7"], "2001:db8::7"),
        (["2001:db8::7", "10.0.0.7"], "10.0.0.7"),
    ],
    ids=str,
)
def test_slot_is_reached_at_the_address_of_its_host_name_that_other_machines_reach(
    monkeypatch: pytest.MonkeyPatch, resolved: list[str], host: str
) -> None:
    _machine(monkeypatch, {"worker": resolved})
    assert find_slot_host(DRIVER, None) == host


@pytest.mark.parametrize("resolved", [["127.0.1.1"], [], ["::1", "fe80::1"]], ids=str)
def test_slot_whose_host_name_leads_nowhere_is_reached_by_its_route_to_the_driver(
    monkeypatch: pytest.MonkeyPatch, resolved: list[str]
) -> None:
    """The driver is on this machine here, so its own address is that of the route."""
    _machine(monkeypatch, {"worker": resolved})
    assert find_slot_host(DRIVER, None) == "127.0.0.1"


def test_machine_without_any_address_is_refused_by_name_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _machine(monkeypatch, {"worker": []})
    with pytest.raises(ConfigError, match=r"'worker'.* driver at 'driver'.*slot_host=…"):
        find_slot_host("grpc://driver:4000", None)


def test_slot_host_is_read_on_the_machine_of_the_slot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "host").write_text("10.0.0.9\n")
    assert find_slot_host(DRIVER, f"${{file:{tmp_path / 'host'}}}") == "10.0.0.9"
    monkeypatch.setenv("SLOT_HOST", "10.0.0.8")
    assert find_slot_host(DRIVER, "${env:SLOT_HOST}") == "10.0.0.8"
    monkeypatch.delenv("SLOT_HOST")
    with pytest.raises(ConfigError, match="slot_host: environment variable SLOT_HOST is not set"):
        find_slot_host(DRIVER, "${env:SLOT_HOST}")


def test_loopback_is_told_from_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"worker": ["127.0.1.1"], "both": ["127.0.0.1", "10.0.0.7"]}
    _machine(monkeypatch, names)
    assert [leads_to_loopback(host) for host in ("worker", "::1", "127.0.0.1")] == [True] * 3
    assert not any(leads_to_loopback(host) for host in ("both", "10.0.0.7", "nowhere"))


def test_locations_have_brackets_around_addresses_of_ipv6_alone() -> None:
    assert to_location("grpc", "10.0.0.7", 4000) == "grpc://10.0.0.7:4000"
    assert to_location("grpc", "worker", 4000) == "grpc://worker:4000"
    assert to_location("grpc", "2001:db8::7", 4000) == "grpc://[2001:db8::7]:4000"
    # As Spark writes spark.driver.host.
    assert to_location("grpc", "[2001:db8::7]", 4000) == "grpc://[2001:db8::7]:4000"


def test_slots_of_machines_that_have_ipv6_alone_reach_each_other() -> None:
    if find_route_source("::1") != "::1":
        pytest.skip("this machine has no IPv6")
    credentials = Credentials("secret")
    server = DataServer("::1", credentials, SlotIdentity("job", 1, 0), lambda _: None, 5.0)
    assert server.address == f"grpc://[::1]:{server.port}"
    # What answers is past the check of the token: it has no action of any name.
    client = cast("Any", credentials.slot_client(server.address))
    with pytest.raises(pa.ArrowNotImplementedError):
        list(client.do_action("any", credentials.of_call()))
    server.close(5.0)


def test_slots_of_one_network_stack_have_one_identity() -> None:
    assert read_network_id() == read_network_id()
