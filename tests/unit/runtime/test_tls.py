"""Tests that driver and slots refuse connections without a certificate of the attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from onceflow.core.errors import ConfigError, SlotLost
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.messages import Hello
from onceflow.core.runtime.transport.control_plane import (
    ControlEvent,
    ControlServer,
    ControlStream,
    SlotConnected,
)
from onceflow.core.runtime.transport.credentials import (
    Credentials,
    TlsIdentity,
    draw_identities,
    identity_in,
)
from onceflow.core.runtime.transport.data_plane import DataServer, FlightChannel, SlotIdentity
from onceflow.core.settings.pipeline_settings import RuntimeSettings, TlsFiles

SCHEMA = pa.schema([("id", pa.int64())])
HELLO = Hello(AttemptId(1), 0, 1, 1, "here", "nowhere", {})


@pytest.fixture(scope="module")
def identities() -> tuple[TlsIdentity, TlsIdentity]:
    return draw_identities()


@pytest.fixture
def events() -> list[ControlEvent]:
    return []


@pytest.fixture
def driver(
    identities: tuple[TlsIdentity, TlsIdentity], events: list[ControlEvent]
) -> Iterator[ControlServer]:
    server = ControlServer("127.0.0.1", Credentials("secret", identities[0]), events.append)
    yield server
    server.shutdown()


def say_hello(address: str, credentials: Credentials) -> None:
    """Dial as a slot, and return when the driver has heard the end of the stream."""
    ControlStream(address, credentials, HELLO, lambda _: None).close(5.0)


def test_a_slot_with_the_attempts_certificate_is_heard(
    driver: ControlServer,
    events: list[ControlEvent],
    identities: tuple[TlsIdentity, TlsIdentity],
) -> None:
    assert driver.address.startswith("grpc+tls://")
    say_hello(driver.address, Credentials("secret", identities[1]))
    assert isinstance(events[0], SlotConnected)


def without_tls(address: str, identity: TlsIdentity) -> flight.FlightClient:
    return flight.FlightClient(address.replace("grpc+tls", "grpc"))


def of_another_attempt(address: str, identity: TlsIdentity) -> flight.FlightClient:
    other = replace(draw_identities()[1], authority=identity.authority)
    return Credentials("secret", other).driver_client(address)


def without_a_certificate(address: str, identity: TlsIdentity) -> flight.FlightClient:
    return flight.FlightClient(
        address, tls_root_certs=identity.authority, override_hostname=identity.driver_name
    )


def that_trusts_another_attempt(address: str, identity: TlsIdentity) -> flight.FlightClient:
    other = replace(identity, authority=draw_identities()[1].authority)
    return Credentials("secret", other).driver_client(address)


@pytest.mark.parametrize(
    "client",
    [without_tls, of_another_attempt, without_a_certificate, that_trusts_another_attempt],
)
def test_a_client_without_the_right_certificate_is_refused_though_it_has_the_token(
    driver: ControlServer,
    events: list[ControlEvent],
    identities: tuple[TlsIdentity, TlsIdentity],
    client: Callable[[str, TlsIdentity], flight.FlightClient],
) -> None:
    dialled = client(driver.address, identities[1])
    with pytest.raises((flight.FlightUnavailableError, flight.FlightInternalError)):
        _exchange(dialled, Credentials("secret"))
    assert events == []


def test_a_client_without_the_token_is_refused_though_it_has_a_certificate(
    driver: ControlServer,
    events: list[ControlEvent],
    identities: tuple[TlsIdentity, TlsIdentity],
) -> None:
    client = Credentials("", identities[1]).driver_client(driver.address)
    with pytest.raises(flight.FlightUnauthenticatedError):
        _exchange(client, Credentials("guess"))
    assert events == []


def test_a_slot_cannot_pose_as_the_driver(
    identities: tuple[TlsIdentity, TlsIdentity], events: list[ControlEvent]
) -> None:
    slot = Credentials("secret", identities[1])
    impostor = ControlServer("127.0.0.1", slot, events.append)
    with pytest.raises((flight.FlightUnavailableError, flight.FlightInternalError)):
        _exchange(slot.driver_client(impostor.address), slot)
    assert events == []
    impostor.shutdown()


def test_channels_between_slots_are_as_closed(identities: tuple[TlsIdentity, TlsIdentity]) -> None:
    slot = Credentials("secret", identities[1])
    losses: list[str] = []
    server = DataServer("127.0.0.1", slot, SlotIdentity("job", 1, 0), losses.append, 5.0)
    server.serve_gates({})
    for client in (
        flight.FlightClient(server.address.replace("grpc+tls", "grpc")),
        Credentials("secret", draw_identities()[1]).slot_client(server.address),
    ):
        with pytest.raises(SlotLost, match="cannot be opened"):
            FlightChannel(
                client,
                Credentials("secret"),
                chain="balance",
                source=1,
                target=SlotIdentity("job", 1, 0),
                channel=1,
                schema=SCHEMA,
            )
    assert losses == []
    server.close(5.0)


def test_keys_and_token_are_in_no_text(identities: tuple[TlsIdentity, TlsIdentity]) -> None:
    text = repr([Credentials("secret-token", identity) for identity in identities])
    assert "secret-token" not in text
    assert "PRIVATE KEY" not in text


def test_files_of_the_users_own_serve_as_well(
    tmp_path: Path, identities: tuple[TlsIdentity, TlsIdentity], events: list[ControlEvent]
) -> None:
    own = identities[0]
    contents = {"certificate": own.certificate, "key": own.key, "authority": own.authority}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    certificate, key, authority = (str(tmp_path / name) for name in contents)
    files = TlsFiles(certificate, key, authority, server_name=own.driver_name)
    credentials = Credentials("secret", identity_in(files))
    server = ControlServer("127.0.0.1", credentials, events.append)
    say_hello(server.address, credentials)
    assert isinstance(events[0], SlotConnected)
    server.shutdown()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "crt").write_text("")
    with pytest.raises(ConfigError, match=r"TlsFiles\(key='/none.key'\) cannot be read here"):
        identity_in(TlsFiles(str(tmp_path / "crt"), "/none.key", "/none.ca"))


@pytest.mark.parametrize("value", ["yes", True, None])
def test_another_setting_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"tls.* 'auto', 'on', 'off' or TlsFiles"):
        RuntimeSettings(tls=value)


def _exchange(client: flight.FlightClient, credentials: Credentials) -> None:
    writer, reader = client.do_exchange(
        flight.FlightDescriptor.for_path(b"control"), credentials.of_call()
    )
    writer.write_metadata(b"")
    reader.read_chunk()
