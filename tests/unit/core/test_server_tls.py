"""The TLS of onceflow's own servers: the error names files that no server can use."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from onceflow.core.runtime.transport.certificates import Authority
from onceflow.core.server_tls import load_server_tls


@pytest.fixture
def files(tmp_path: Path) -> Path:
    now = dt.datetime.now(dt.timezone.utc)
    authority = Authority(now - dt.timedelta(hours=1), now + dt.timedelta(hours=1))
    certificate, key = authority.issue("localhost")
    locked = serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"open sesame"),
    )
    for name, data in (("a.crt", certificate), ("a.key", key), ("locked.key", locked)):
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_files_of_a_server_are_loaded(files: Path) -> None:
    assert load_server_tls(str(files / "a.crt"), str(files / "a.key"))


@pytest.mark.parametrize("key", ["locked.key", "no.key", "a.crt"])
def test_a_key_that_cannot_be_used_is_named_and_no_terminal_is_asked(
    files: Path, capfd: pytest.CaptureFixture[str], key: str
) -> None:
    with pytest.raises(OSError, match=key):
        load_server_tls(str(files / "a.crt"), str(files / key))
    assert "pass phrase" not in capfd.readouterr().err
