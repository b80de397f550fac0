"""Options by which databases are read."""

from __future__ import annotations

import pickle

import pytest

from onceflow.connectors.spark.options.sql_reads import MYSQL_READ, POSTGRES_READ
from onceflow.connectors.spark.readers.sql import Bounds
from onceflow.core.errors import ConfigError

_POSTGRES = "jdbc:postgresql://nowhere/shop?user=reader"
_MYSQL = "jdbc:mysql://nowhere/shop?user=reader"
_SECRET = "hunter-of-rows"


def test_jdbcs_options_are_taken_as_they_are() -> None:
    given = {
        "url": _POSTGRES,
        "dbtable": "public.orders",
        "numpartitions": "8",
        "partitioncolumn": "id",
        "lowerbound": "0",
        "upperbound": "1000",
        "fetchsize": "5000",
        "driver": "org.postgresql.Driver",
    }
    reading = POSTGRES_READ.make(given)
    assert reading.source.relation == '"public"."orders"'
    assert (reading.bounds, reading.tasks) == (Bounds("id", "0", "1000"), 8)
    assert MYSQL_READ.make({"url": _MYSQL, "dbtable": "orders"}).source.relation == "`orders`"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give dbtable or query"),
        ({"dbtable": "orders", "query": "SELECT 1"}, "one of the two"),
        ({"dbtable": "(SELECT 1) AS one.two.three"}, "a SELECT goes into query, or stands in"),
        ({"dbtable": "orders", "lowerBound": "0"}, "give all of partitionColumn"),
        ({"dbtable": "orders", "numPartition": "2"}, "did you mean 'numPartitions'"),
        ({"dbtable": "orders", "customSchema": "id INT"}, "give the schema by"),
        ({"dbtable": "orders", "numPartitions": "0"}, "a whole number, 1 or more"),
    ],
)
def test_options_that_contradict_or_are_unknown_are_refused(
    options: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        POSTGRES_READ.make({"url": _POSTGRES, **options})


@pytest.mark.parametrize(
    "given",
    [
        {"query": "SELECT (1) AS id"},
        {"dbtable": "(SELECT (1) AS id) t"},
        {"dbtable": ' (SELECT (1) AS id)\nAS "t" '},
    ],
)
def test_a_query_is_read_by_either_option_as_jdbc_has_it(given: dict[str, str]) -> None:
    for table, url in ((POSTGRES_READ, _POSTGRES), (MYSQL_READ, _MYSQL)):
        source = table.make({"url": url, **given}).source
        assert source.relation == "(SELECT (1) AS id) AS onceflow_rows"


def test_a_password_by_reference_is_in_no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READER_PASSWORD", _SECRET)
    for table, url in ((POSTGRES_READ, _POSTGRES), (MYSQL_READ, _MYSQL)):
        given = {"url": url, "dbtable": "orders", "password": "${env:READER_PASSWORD}"}
        reading = table.make(given)
        assert _SECRET.encode() not in pickle.dumps(reading)
        assert _SECRET not in repr(reading)
