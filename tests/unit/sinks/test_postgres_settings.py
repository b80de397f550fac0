"""Tests the settings of a Postgres sink that need no server."""

from __future__ import annotations

import dataclasses
import pickle
import time
import traceback
from collections.abc import Callable, Generator
from typing import Any

import pyarrow as pa
import pytest

from onceflow.clients.postgres import connection
from onceflow.clients.sql.tables import TableName
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import CommitterContext
from onceflow.sinks import PostgresSink

PASSWORD = "p@ss/w:rd%#?"
_QUOTED = "p%40ss%2Fw%3Ard%25%23%3F"


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://ann:{_QUOTED}@db.example:6432/shop?sslmode=require",
        f"postgres://ann:{_QUOTED}@db.example:6432/shop?sslmode=require",
        f"postgresql+psycopg://ann:{_QUOTED}@db.example:6432/shop?sslmode=require",
        f"postgresql+psycopg2://ann:{_QUOTED}@db.example:6432/shop?sslmode=require",
        f"jdbc:postgresql://db.example:6432/shop?user=ann&password={_QUOTED}&sslmode=require",
    ],
)
def test_every_form_of_url_says_the_same(url: str) -> None:
    sink = PostgresSink(url, table="ledger")
    assert dict(sink.endpoint.parameters) == {
        "user": "ann",
        "password": PASSWORD,
        "host": "db.example",
        "port": "6432",
        "dbname": "shop",
        "sslmode": "require",
    }
    assert "db.example:6432" in repr(sink)
    assert "'shop'" in repr(sink)


def test_several_hosts_are_kept() -> None:
    sink = PostgresSink("postgresql://a:1,b:2/shop?target_session_attrs=read-write", table="ledger")
    parameters = dict(sink.endpoint.parameters)
    assert (parameters["host"], parameters["port"]) == ("a,b", "1,2")


def test_user_and_password_go_over_the_url() -> None:
    sink = PostgresSink(
        "postgresql://ann:old@h/shop", table="ledger", user="bob", password=PASSWORD
    )
    parameters = dict(sink.endpoint.parameters)
    assert (parameters["user"], parameters["password"]) == ("bob", PASSWORD)


@pytest.mark.parametrize("in_url", [True, False])
def test_password_pickles_and_is_never_printed(in_url: bool) -> None:
    if in_url:
        sink = PostgresSink(f"postgresql://ann:{_QUOTED}@h/shop", table="ledger")
    else:
        sink = PostgresSink("postgresql://ann@h/shop", table="ledger", password=PASSWORD)
    copy = pickle.loads(pickle.dumps(sink))
    assert copy == sink
    assert dict(copy.endpoint.parameters)["password"] == PASSWORD
    context = CommitterContext("job", "ledger", "job.ledger", AttemptId(1))
    for shown in (repr(sink), str(sink), repr(sink.settings), repr(sink.committer(context))):
        assert PASSWORD not in shown
        assert _QUOTED not in shown


def test_sink_is_frozen() -> None:
    sink = PostgresSink("postgresql://h/shop", table="ledger")
    with pytest.raises(dataclasses.FrozenInstanceError):
        sink.table = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "url",
    [
        "mysql://ann:secret@h/shop",
        "ann:secret@h/shop",
        "host=h password=secret",
        "ann:secret@h://shop",
        "postgresql://ann:secret@[::1/shop",
        "postgresql://ann:sec%zzret@h/shop",
        "postgresql://ann:secret@h/shop?secret=1",
        "postgresql+psycopg://ann:secret@h:secret/shop",
        "jdbc:postgresql://h/shop?password=secret&secret",
    ],
)
def test_unreadable_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError, match="url ") as failure:
        PostgresSink(url, table="ledger")
    assert "secret" not in str(failure.value)
    assert "zzret" not in str(failure.value)
    assert "secret" not in "".join(traceback.format_exception(failure.value))


@pytest.mark.parametrize(
    "make",
    [
        lambda: PostgresSink("postgresql://h/d", table=""),
        lambda: PostgresSink("postgresql://h/d", table="a.b.c"),
        lambda: PostgresSink("postgresql://h/d", table="a."),
        lambda: PostgresSink("postgresql://h/d", table="t", delivery="twice"),  # type: ignore[arg-type]
        lambda: PostgresSink("postgresql://h/d", table="t", commit_mode="three_phase"),  # type: ignore[arg-type]
        lambda: PostgresSink("postgresql://h/d", table="t", write_mode="merge"),  # type: ignore[arg-type]
        lambda: PostgresSink("postgresql://h/d", table="t", write_mode="upsert"),
        lambda: PostgresSink("postgresql://h/d", table="t", tombstones=True),
        lambda: PostgresSink("postgresql://h/d", table="t", overflow="wrap"),  # type: ignore[arg-type]
        lambda: PostgresSink("postgresql://h/d", table="t", primary_key="id"),  # type: ignore[arg-type]
        lambda: PostgresSink("postgresql://h/d", table="t", connect_timeout_s=0),
        lambda: PostgresSink("postgresql://h/d", table="t", lock_timeout_s=-1),
        lambda: PostgresSink("postgresql://h/d", table="t", statement_timeout_s=float("nan")),
        lambda: PostgresSink("postgresql://h/d", table="t", flush_rows=0),
        lambda: PostgresSink("postgresql://h/d", table="t", ledger_schema=""),
    ],
)
def test_setting_that_is_wrong_by_itself_is_refused_when_it_is_made(
    make: Callable[[], PostgresSink],
) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("sink_id", ["", "a/b", "x" * 33, "é"])
def test_sink_id_that_is_no_part_of_a_transaction_name_is_refused_before_connecting(
    sink_id: str,
) -> None:
    sink = PostgresSink("postgresql://127.0.0.1:1/d", table="t")
    context = CommitterContext("job", "ledger", sink_id, AttemptId(1))
    with pytest.raises(ConfigError, match="sink id"):
        sink.open(context, pa.schema([("id", pa.int64())]))


def test_table_names_keep_their_case() -> None:
    assert TableName.parse("Sales.Ledger") == TableName("Sales", "Ledger")
    assert str(TableName.parse("Ledger")) == "Ledger"


@pytest.mark.parametrize("table", ['"Ledger"', 'Sales."Ledger"', '"Sales".Ledger', "`Ledger`"])
def test_a_table_in_the_quotes_of_sql_is_refused(table: str) -> None:
    """Spark's JDBC writer wants them; here they would be a part of the name of a new table."""
    with pytest.raises(ConfigError, match=r"is in quotes.*: write (Sales\.)?Ledger;"):
        PostgresSink("postgresql://host/db", table=table)


def test_writers_are_known_by_exactly_their_sink_id() -> None:
    name = connection.writer_name("app.x", 7, 3)
    assert connection.attempt_of_writer(name, "app.x") == 7
    assert connection.attempt_of_writer(name, "app") is None
    assert connection.attempt_of_writer(name, "app_x") is None
    assert connection.attempt_of_writer("psql", "app.x") is None
    # Postgres cuts names off after 63 bytes.
    assert len(connection.writer_name("s" * 32, 99_999_999, 32_767)) <= 63


def _talk(states: list[int]) -> Generator[int, int, list[int]]:
    heard: list[int] = []
    while len(heard) < len(states):
        heard += [(yield states[len(heard)])]
    return heard


def test_wait_passes_everything_through_and_ends_when_nothing_comes() -> None:
    bounded: Generator[Any, Any, list[int]] = connection.until_silent(_talk([1, 2]), timeout_s=60)
    assert next(bounded) == 1
    assert bounded.send(10) == 2
    with pytest.raises(StopIteration) as done:
        bounded.send(20)
    assert done.value.value == [10, 20]

    silent: Generator[Any, Any, list[int]] = connection.until_silent(
        _talk([1] * 1000), timeout_s=0.01
    )
    next(silent)
    time.sleep(0.02)
    assert silent.send(1) == 1, "an answer is taken however late it is"
    with pytest.raises(connection.ReplyTimeout, match=r"0\.01 s"):
        silent.send(0)
