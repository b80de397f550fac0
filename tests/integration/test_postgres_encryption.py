"""Encryption of Postgres: what a wrong parameter, file or certificate of TLS makes of a job."""

from __future__ import annotations

import datetime as dt
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict
from tests.integration.doctor_kit import examine, worst
from tests.support.tls_front import front_of

from onceflow import Checkpointing, LocalProcesses, Pipeline
from onceflow.core.errors import SettingsRefused
from onceflow.core.runtime.transport.certificates import Authority
from onceflow.sinks import PostgresSink
from onceflow.sources import DatagenSource


@dataclass(frozen=True)
class Encrypted:
    """A database behind TLS that asks for certificates of clients, and the files of a client."""

    url: str
    files: Path

    def with_parameters(self, parameters: str) -> str:
        """Return the url with `parameters`, in which DIR stands for the directory of files."""
        return f"{self.url}?{parameters.replace('DIR', str(self.files))}"


def _authority() -> Authority:
    now = dt.datetime.now(dt.timezone.utc)
    return Authority(now - dt.timedelta(hours=1), now + dt.timedelta(hours=1))


@pytest.fixture
def encrypted(postgres_database: str, tmp_path: Path) -> Iterator[Encrypted]:
    own, other = _authority(), _authority()
    for name, data in (
        ("own.crt", own.certificate),
        ("other.crt", other.certificate),
        *zip(("server.crt", "server.key"), own.issue("localhost"), strict=True),
        *zip(("app.crt", "app.key"), own.issue("app"), strict=True),
        *zip(("stranger.crt", "stranger.key"), other.issue("app"), strict=True),
    ):
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "open.key").write_bytes((tmp_path / "app.key").read_bytes())
    (tmp_path / "open.key").chmod(0o644)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    context.load_verify_locations(tmp_path / "own.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    given = conninfo_to_dict(postgres_database)
    with front_of((str(given["host"]), int(str(given["port"]))), context) as port:
        yield Encrypted(
            f"postgresql://{given['user']}@localhost:{port}/{given['dbname']}", tmp_path
        )


_FULL = "sslmode=verify-full&sslrootcert=DIR/own.crt"
_CLIENT = "sslcert=DIR/app.crt&sslkey=DIR/app.key"


def _run(url: str, storage: Path) -> None:
    pipeline = Pipeline(LocalProcesses(), name="tls", checkpointing=Checkpointing(str(storage)))
    sink = PostgresSink(url, table="payments", create=True, connect_timeout_s=10)
    pipeline.read(DatagenSource(rows=10), uid="in").write(sink, uid="out")
    pipeline.run(60)


def test_rows_are_written_over_verified_tls(encrypted: Encrypted, tmp_path: Path) -> None:
    _run(encrypted.with_parameters(f"{_FULL}&{_CLIENT}"), tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("parameters", "reason", "remedy"),
    [
        ("sslmode=verify_full", 'invalid sslmode value: "verify_full"', "sslmode=verify-full"),
        ("sslmode=require&sslrootcert=system", "weak sslmode", "sslmode=verify-full"),
        (f"{_FULL}&ssl_min_protocol_version=TLSv9", "invalid .*TLSv9", "leave the parameter out"),
        (f"{_FULL}&target_session_attrs=rw", "target_session_attrs", "leave the parameter out"),
        (f"{_FULL}&{_CLIENT}&channel_binding=require", "channel binding", "channel_binding=prefer"),
        (f"{_FULL}&{_CLIENT}&require_auth=scram-sha-256", "method requirement", "pg_hba.conf"),
        ("sslmode=verify-full&sslrootcert=DIR/no.crt", 'no.crt" does not exist', "sslrootcert="),
        (
            "sslmode=verify-full&sslrootcert=DIR/other.crt",
            "verify failed|signature failure",
            "sslrootcert=",
        ),
        (f"{_FULL}&hostaddr=127.0.0.1&host=db.test", "not match host name", "must name the host"),
        (f"{_FULL}&sslcert=DIR/app.crt&sslkey=DIR/open.key", "world access", "chmod 600"),
        (f"{_FULL}&sslcert=DIR/app.crt&sslkey=DIR/stranger.key", "mismatch", "sslkey="),
        (
            f"{_FULL}&sslcert=DIR/stranger.crt&sslkey=DIR/stranger.key",
            "decrypt error",
            "ssl_ca_file",
        ),
        (_FULL, "certificate required", "sslcert="),
    ],
)
def test_what_no_restart_makes_good_ends_the_start_and_is_told_with_its_remedy(
    encrypted: Encrypted, tmp_path: Path, parameters: str, reason: str, remedy: str
) -> None:
    url = encrypted.with_parameters(parameters)
    with pytest.raises(SettingsRefused, match=reason):
        _run(url, tmp_path / "checkpoints")
    (finding,) = worst(examine("--url", url)[1])
    assert remedy in finding["remedy"]
    assert "CREATE DATABASE" not in finding["remedy"]
    assert "PASSWORD" not in finding["remedy"]
