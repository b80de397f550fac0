"""Logins that Postgres refuses in another language: libpq tells their text alone."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo
from tests.integration.doctor_kit import examine, worst

from onceflow import Checkpointing, LocalProcesses, Pipeline
from onceflow.clients.postgres.login_states import find_login_state
from onceflow.core.errors import SettingsRefused, SinkError
from onceflow.sinks import PostgresSink
from onceflow.sources import DatagenSource, PostgresChanges

_SSL_REQUEST = struct.pack("!ii", 8, 80877103)


@contextlib.contextmanager
def refusing(state: str, text: str) -> Generator[str, None, None]:
    """Yield the url of a server that refuses every login with `text`, as a German server does."""
    fields = (("S", "FATAL"), ("V", "FATAL"), ("C", state), ("M", text))
    body = b"".join(f"{key}{value}\0".encode() for key, value in fields) + b"\0"
    refusal = b"E" + struct.pack("!i", len(body) + 4) + body
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client, contextlib.suppress(OSError):
                    if client.recv(8, socket.MSG_PEEK) == _SSL_REQUEST:
                        client.recv(8)
                        client.sendall(b"N")
                    client.recv(4096)
                    client.sendall(refusal)

        threading.Thread(target=accept, daemon=True).start()
        yield f"postgresql://app@127.0.0.1:{listener.getsockname()[1]}/bank"
        # Closing the listener alone does not wake the thread that accepts.
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("state", "text", "remedy"),
    [
        ("3D000", "Datenbank »bank« existiert nicht", "CREATE DATABASE"),
        ("28000", "Rolle »app« existiert nicht", "CREATE ROLE"),
        ("28P01", "Passwort-Authentifizierung für »app« fehlgeschlagen", "PASSWORD '…'"),
        ("42501", "keine Berechtigung für Datenbank »bank«", "GRANT CONNECT"),
        ("42704", "unbekannter Konfigurationsparameter »foo«", "leave the parameter out"),
    ],
)
def test_a_login_refused_in_another_language_ends_the_start_and_is_told_with_its_remedy(
    tmp_path: Path, state: str, text: str, remedy: str
) -> None:
    with refusing(state, text) as url:
        pipeline = Pipeline(LocalProcesses(), name="l", checkpointing=Checkpointing(str(tmp_path)))
        pipeline.read(DatagenSource(rows=10), uid="in").write(
            PostgresSink(url, table="t"), uid="out"
        )
        with pytest.raises(SettingsRefused, match=rf"{text} \(SQLSTATE {state}\)"):
            pipeline.run(60)
        with pytest.raises(SettingsRefused, match=state):
            _ = PostgresChanges(url, table="t").schema
        (finding,) = worst(examine("--url", url)[1])
    assert remedy in finding["remedy"]


def test_a_refusal_that_ends_by_itself_is_waited_for_in_every_language() -> None:
    with refusing("57P03", "das Datenbanksystem startet") as url:
        endpoint = PostgresSink(url, table="t").endpoint
        with pytest.raises(SinkError, match=r"startet \(SQLSTATE 57P03\)") as caught:
            endpoint.connect("test")
    assert not isinstance(caught.value, SettingsRefused)


def test_the_state_of_a_refused_login_is_read_from_the_server(postgres_database: str) -> None:
    for parameter, state in (("dbname", "3D000"), ("user", "28000")):
        conninfo = make_conninfo(postgres_database, **{parameter: "nowhere"})
        assert find_login_state(conninfo, 20.0) == state
    assert find_login_state(postgres_database, 20.0) is None


def test_the_state_is_read_although_the_process_has_a_thousand_open_files(
    postgres_database: str,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2_048
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"a process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1_100)]
    try:
        assert find_login_state(make_conninfo(postgres_database, user="nowhere"), 20.0) == "28000"
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
