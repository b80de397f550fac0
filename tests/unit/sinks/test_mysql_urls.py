"""URLs of MySQL that name no server to connect to."""

from __future__ import annotations

import pytest

from onceflow.core.errors import ConfigError
from onceflow.sinks import MySQLSink


@pytest.mark.parametrize(
    "url",
    [
        "mysql://app:secret@one,two/shop",
        "mysql://app:secret@one:3306,two:3306/shop",
        "jdbc:mysql://one:3306,two:3306/shop?user=app",
    ],
)
def test_a_url_with_several_hosts_is_refused_for_them(url: str) -> None:
    with pytest.raises(ConfigError, match="url names several hosts.*name one") as failure:
        MySQLSink(url, table="t")
    assert "secret" not in str(failure.value)


def test_a_comma_in_a_password_is_not_taken_for_hosts() -> None:
    MySQLSink("mysql://app:a,b@one:3306/shop", table="t")
    with pytest.raises(ConfigError, match="percent-encode special characters") as failure:
        MySQLSink("mysql://app:p@ss:w,ord@one/shop", table="t")
    assert "w,ord" not in str(failure.value)
