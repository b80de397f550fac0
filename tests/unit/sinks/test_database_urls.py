"""Names in the URLs of databases."""

from __future__ import annotations

import pytest

from onceflow.sinks import MySQLSink, PostgresSink


@pytest.mark.parametrize("driver", ["", "+pymysql"])
def test_the_database_of_a_mysql_url_is_percent_decoded(driver: str) -> None:
    sink = MySQLSink(f"mysql{driver}://app@db.test/a%2Fb%3F%60?ssl_mode=required", table="t")
    assert str(sink.settings.endpoint).startswith("database 'a/b?`' at db.test:3306")


def test_the_database_of_a_postgres_url_is_percent_decoded() -> None:
    sink = PostgresSink("postgresql://app@db.test/a%2Fb%3F%60?sslmode=require", table="t")
    assert "a/b?`" in str(sink.settings.endpoint)
