"""Names in the URLs of databases."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onceflow.core.errors import ConfigError
from onceflow.sinks import MySQLSink, PostgresSink
from onceflow.sources import PostgresChanges, PostgresTable


@pytest.mark.parametrize("driver", ["", "+pymysql"])
def test_the_database_of_a_mysql_url_is_percent_decoded(driver: str) -> None:
    sink = MySQLSink(f"mysql{driver}://app@db.test/a%2Fb%3F%60?ssl_mode=required", table="t")
    assert str(sink.settings.endpoint).startswith("database 'a/b?`' at db.test:3306")


def test_the_database_of_a_postgres_url_is_percent_decoded() -> None:
    sink = PostgresSink("postgresql://app@db.test/a%2Fb%3F%60?sslmode=require", table="t")
    assert "a/b?`" in str(sink.settings.endpoint)


def _sink(url: str) -> object:
    return PostgresSink(url, table="t")


def _changes(url: str) -> object:
    return PostgresChanges(url, table="t")


def _lookups(url: str) -> object:
    return PostgresTable(url, table="t")


@pytest.mark.parametrize("make", [_sink, _changes, _lookups])
@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
def test_an_encoding_that_would_change_every_text_is_refused(
    scheme: str, make: Callable[[str], object]
) -> None:
    with pytest.raises(ConfigError, match="client_encoding=latin1: texts are .* UTF-8 only"):
        make(f"{scheme}://app@db.test/bank?client_encoding=latin1")
    for name in ("utf8", "UTF-8", "Unicode"):
        make(f"{scheme}://app@db.test/bank?client_encoding={name}")


@pytest.mark.parametrize(
    ("sink", "scheme"),
    [
        (PostgresSink, "postgresql"),
        (PostgresSink, "postgresql+psycopg"),
        (MySQLSink, "mysql"),
        (MySQLSink, "mariadb+pymysql"),
    ],
)
def test_no_end_of_a_password_with_an_at_sign_is_taken_for_the_host(
    sink: type[PostgresSink | MySQLSink], scheme: str
) -> None:
    with pytest.raises(ConfigError, match="percent-encode") as refusal:
        sink(f"{scheme}://app:sec@ret@db.test/bank", table="t")
    assert "ret@" not in str(refusal.value)
