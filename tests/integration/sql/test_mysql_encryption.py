"""Tests that logins to MySQL follow `ssl_mode`, whatever certificates the machine has."""

from __future__ import annotations

import pytest

from onceflow.clients.mysql.connection import MySQLSession
from onceflow.clients.mysql.endpoint import endpoint_of
from onceflow.clients.sql.session import DatabaseAccess
from onceflow.core.errors import ConfigError


def _login(url: str) -> MySQLSession:
    endpoint = endpoint_of(DatabaseAccess(url, connect_timeout_s=60.0), lock_timeout_s=60.0)
    return endpoint.connect("test")


@pytest.mark.parametrize(
    ("settings", "encrypted"),
    [
        ("", True),
        ("?ssl_mode=preferred", True),
        ("?ssl_mode=required", True),
        ("?ssl_mode=disabled", False),
    ],
)
def test_login_is_encrypted_unless_that_is_turned_off(
    mysql_database: str, settings: str, encrypted: bool
) -> None:
    session = _login(f"{mysql_database}{settings}")
    ((_, cipher),) = session.query("SHOW SESSION STATUS LIKE 'Ssl_cipher'")
    session.close()
    assert bool(cipher) == encrypted


@pytest.mark.parametrize("mode", ["verify_ca", "verify_identity"])
def test_server_that_nobody_vouches_for_is_refused_where_it_is_verified(
    mysql_database: str, mode: str
) -> None:
    with pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"):
        _login(f"{mysql_database}?ssl_mode={mode}")
