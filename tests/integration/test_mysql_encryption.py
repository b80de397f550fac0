"""Encryption of MySQL: what a wrong parameter, file or certificate of TLS makes of a job."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from tests.integration.doctor_kit import examine, worst
from tests.integration.mysql_sink_kit import query

from onceflow import Checkpointing, LocalProcesses, Pipeline
from onceflow.core.errors import SettingsRefused
from onceflow.core.runtime.transport.certificates import Authority
from onceflow.integration.servers import EmbeddedMariaDB, EmbeddedMySQL
from onceflow.sinks import MySQLSink
from onceflow.sources import DatagenSource


@dataclass(frozen=True)
class Encrypted:
    """A database of a server with TLS, and the files of a client."""

    url: str
    files: Path

    def with_parameters(self, parameters: str) -> str:
        """Return the url with `parameters`, in which DIR stands for the directory of files."""
        return f"{self.url}?{parameters.replace('DIR', str(self.files))}"


def _authority() -> Authority:
    now = dt.datetime.now(dt.timezone.utc)
    return Authority(now - dt.timedelta(hours=1), now + dt.timedelta(hours=1))


def _encrypt_key(key: bytes) -> bytes:
    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"open sesame"),
    )


@pytest.fixture(
    scope="module",
    params=[EmbeddedMySQL, pytest.param(EmbeddedMariaDB, marks=pytest.mark.servers)],
)
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Encrypted]:
    files = tmp_path_factory.mktemp("tls")
    own, other = _authority(), _authority()
    certificate, key = own.issue("app")
    for name, data in (
        ("own.crt", own.certificate),
        ("other.crt", other.certificate),
        *zip(("server.crt", "server.key"), own.issue("localhost"), strict=True),
        *zip(("stranger.crt", "stranger.key"), other.issue("app"), strict=True),
        ("app.crt", certificate),
        ("app.key", key),
        ("locked.key", _encrypt_key(key)),
        ("junk.crt", b"no certificate"),
    ):
        (files / name).write_bytes(data)
    options = {
        f"ssl_{name}": str(files / f"server.{end}")
        for name, end in (("cert", "crt"), ("key", "key"))
    }
    with request.param({"ssl_ca": str(files / "own.crt"), **options}) as server:
        query(server.url, "CREATE DATABASE bank")
        url = server.database_url("bank")
        yield Encrypted(url.replace("127.0.0.1", "localhost"), files)


_FULL = "ssl_mode=verify_identity&ssl_ca=DIR/own.crt"
_CLIENT = "ssl_cert=DIR/app.crt&ssl_key=DIR/app.key"
_LOCKED = "ssl_cert=DIR/app.crt&ssl_key=DIR/locked.key"


def _run(url: str, storage: Path) -> None:
    pipeline = Pipeline(LocalProcesses(), name="tls", checkpointing=Checkpointing(str(storage)))
    sink = MySQLSink(url, table="payments", create=True, connect_timeout_s=10)
    pipeline.read(DatagenSource(rows=10), uid="in").write(sink, uid="out")
    pipeline.run(60)


def test_rows_are_written_over_verified_tls(database: Encrypted, tmp_path: Path) -> None:
    storage = tmp_path / "checkpoints"
    for parameters in (_CLIENT, f"{_LOCKED}&ssl_key_password=open%20sesame"):
        _run(database.with_parameters(f"{_FULL}&{parameters}"), storage)


@pytest.mark.parametrize(
    ("parameters", "reason", "remedy"),
    [
        ("ssl_ca=DIR/no.crt", "ssl_ca=.*no.crt: No such file", "ssl_ca= in the url, a file"),
        ("ssl_ca=DIR/junk.crt", "ssl_ca=.*junk.crt: .*no cert", "ssl_ca= in the url, a file"),
        ("ssl_ca=DIR/other.crt", "VERIFY_FAILED", "the authority of the server"),
        ("ssl_mode=verify_identity", "VERIFY_FAILED", "the authority of the server"),
        (f"{_FULL}&ssl_cert=DIR/no.crt", "ssl_cert=.*no.crt: No such file", "ssl_key_password="),
        (f"{_FULL}&ssl_cert=DIR/app.crt&ssl_key=DIR/no.key", "ssl_key=.*no.key: No", "ssl_key="),
        (f"{_FULL}&ssl_cert=DIR/app.crt&ssl_key=DIR/stranger.key", "mismatch", "ssl_key="),
        (f"{_FULL}&{_LOCKED}", "ssl_key=.*locked.key: ", "ssl_key_password="),
        (f"{_FULL}&{_LOCKED}&ssl_key_password=x", "ssl_key=.*locked.key: ", "ssl_key_password="),
        (
            f"{_FULL}&ssl_cert=DIR/stranger.crt&ssl_key=DIR/stranger.key",
            "(?i)alert.(unknown.ca|decrypt.error)",
            "the server's ssl_ca",
        ),
    ],
)
def test_what_no_restart_makes_good_ends_the_start_and_is_told_with_its_remedy(
    database: Encrypted, tmp_path: Path, parameters: str, reason: str, remedy: str
) -> None:
    url = database.with_parameters(parameters)
    with pytest.raises(SettingsRefused, match=reason):
        _run(url, tmp_path / "checkpoints")
    (finding,) = worst(examine("--url", url)[1])
    assert remedy in finding["remedy"]
    assert "IDENTIFIED BY" not in finding["remedy"]


def test_a_certificate_that_names_another_host_is_refused_with_its_remedy(
    database: Encrypted, tmp_path: Path
) -> None:
    url = database.with_parameters(_FULL).replace("@localhost:", "@127.0.0.1:")
    with pytest.raises(SettingsRefused, match=r"not valid for '127\.0\.0\.1'"):
        _run(url, tmp_path / "checkpoints")
    (finding,) = worst(examine("--url", url)[1])
    assert "must name the host of the url" in finding["remedy"]
