"""The ready connector files, each run as it is against the servers that it is written for."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest
from tests.integration import mysql_sink_kit as mysql
from tests.integration import postgres_sink_kit as postgres
from tests.integration.kafka_feed import produce
from tests.integration.kafka_sink_kit import messages, values_of

from onceflow import JobState, LocalProcesses
from onceflow.cli.run.file.connector_file import read_connector_file
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sources.datagen.nexmark_tables import NexmarkTables

EXAMPLES = Path(__file__).parents[2] / "examples" / "connectors"
PAYMENTS: Sequence[Mapping[str, Any]] = [
    {"id": n, "account": f"a{n % 3}", "amount": n * 10} for n in range(60)
]
Rows = Callable[[], Any]


def run_until(
    directory: Path,
    example: str,
    topics: Mapping[str, str],
    rows: Rows,
    expected: object,
    *changes: tuple[str, str],
) -> None:
    """Run the example, with its topics called otherwise, until its target has what is expected."""
    text = (EXAMPLES / f"{example}.toml").read_text()
    for name, topic in topics.items():
        for written in (f'topic = "{name}"', f'SERVERS}}/{name}"'):
            text = text.replace(written, written.replace(name, topic))
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = directory / f"{example}.toml"
    file.write_text(text)
    job = read_connector_file(file).build(LocalProcesses(directory / "logs")).start()
    try:
        until = time.monotonic() + 120
        while (seen := read_or_none(rows)) != expected:
            assert time.monotonic() < until, (seen, str(job.status()))
            time.sleep(0.1)
        job.stop(60)
    finally:
        job.cancel()
    assert rows() == expected


def read_or_none(rows: Rows) -> object:
    """Return the rows of the target, or None before the job has created it."""
    try:
        return rows()
    except Exception as error:
        return str(error)


@pytest.fixture
def servers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    onceflow_kafka: KafkaServer,
    postgres_database: str,
) -> str:
    monkeypatch.setenv("KAFKA_SERVERS", onceflow_kafka.bootstrap_servers)
    monkeypatch.setenv("POSTGRES_URL", postgres_database)
    monkeypatch.setenv("STORAGE", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    return onceflow_kafka.bootstrap_servers


@pytest.fixture
def payments(servers: str, kafka_topic: TopicFactory) -> str:
    topic = kafka_topic(2)
    produce(servers, topic, [json.dumps(one).encode() for one in PAYMENTS])
    return topic


def test_generated_payments_are_in_a_sqlite_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example that needs no server, run to its end."""
    monkeypatch.setenv("DATA", str(tmp_path))
    file = read_connector_file(EXAMPLES / "generated_to_sqlite.toml")
    assert file.master == "local-processes"
    status = file.build(LocalProcesses(tmp_path / "logs")).run(120)
    assert status.state is JobState.FINISHED
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        (counts,) = db.execute("SELECT count(*), count(DISTINCT id) FROM ledger")
        wrong = db.execute(
            "SELECT account FROM ledger GROUP BY account HAVING max(n) <> count(*)"
        ).fetchall()
    assert (counts, wrong) == ((20_000, 20_000), [])


def test_large_bids_of_nexmark_are_counted_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA", str(tmp_path))
    written = (EXAMPLES / "nexmark_counted.toml").read_text()
    file = tmp_path / "nexmark_counted.toml"
    file.write_text(written.replace("events = 1_000_000", "events = 20_000"))
    status = read_connector_file(file).build(LocalProcesses(tmp_path / "logs")).run(120)
    assert status.state is JobState.FINISHED
    events = np.arange(20_000)
    bids = NexmarkTables(seed=0, interval_us=100).bids(events[events % 50 > 3])
    large = int(np.count_nonzero(bids.column("price").to_numpy() > 1_000_000))
    assert 0 < large < bids.num_rows
    assert [sink.rows_committed for sink in status.sinks] == [large]


@pytest.mark.servers
def test_a_topic_is_in_a_table_of_postgres(tmp_path: Path, payments: str) -> None:
    url = os.environ["POSTGRES_URL"]

    def rows() -> list[tuple[Any, ...]]:
        return postgres.query(url, "SELECT id, account, amount FROM payments ORDER BY id")

    expected = [tuple(one.values()) for one in PAYMENTS]
    run_until(tmp_path, "kafka_to_postgres", {"payments": payments}, rows, expected)


@pytest.mark.servers
def test_the_newest_record_of_each_key_is_in_a_table_of_mysql(
    tmp_path: Path,
    servers: str,
    kafka_topic: TopicFactory,
    mysql_database: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MYSQL_URL", mysql_database)
    topic = kafka_topic()
    produce(
        servers,
        topic,
        [
            json.dumps({"account": f"a{n % 3}", "owner": "eve", "amount": n}).encode()
            for n in range(30)
        ],
    )

    def rows() -> list[tuple[Any, ...]]:
        return mysql.query(
            mysql_database, "SELECT account, owner, amount FROM accounts ORDER BY account"
        )

    expected = [("a0", "eve", 27), ("a1", "eve", 28), ("a2", "eve", 29)]
    run_until(tmp_path, "kafka_to_mysql_upsert", {"accounts": topic}, rows, expected)


@pytest.mark.servers
def test_a_topic_is_in_files_by_account(tmp_path: Path, payments: str) -> None:
    directory = tmp_path / "data" / "payments"

    def rows() -> list[tuple[int, str]]:
        table = ds.dataset(directory, partitioning="hive").to_table().to_pylist()
        return sorted((one["id"], one["account"]) for one in table)

    expected = [(one["id"], one["account"]) for one in PAYMENTS]
    shorter = ('interval = "1 min"', 'interval = "1 s"')
    run_until(tmp_path, "kafka_to_files", {"payments": payments}, rows, expected, shorter)


@pytest.mark.servers
def test_large_payments_are_in_another_topic(
    tmp_path: Path, servers: str, payments: str, kafka_topic: TopicFactory
) -> None:
    target = kafka_topic()

    def rows() -> list[dict[str, Any]]:
        return sorted(values_of(messages(servers, target)), key=lambda one: int(one["id"]))

    expected = [
        {"id": one["id"], "account": one["account"], "hundreds": one["amount"] // 100}
        for one in PAYMENTS
        if one["amount"] >= 100
    ]
    run_until(tmp_path, "kafka_to_kafka", {"payments": payments, "large": target}, rows, expected)


@pytest.mark.servers
def test_changes_of_a_table_make_its_copy(
    tmp_path: Path, servers: str, kafka_topic: TopicFactory
) -> None:
    topic, url = kafka_topic(), os.environ["POSTGRES_URL"]
    order = {"id": 1, "state": "new", "cents": 500}
    envelopes = [
        {"op": "c", "before": None, "after": order},
        {"op": "c", "before": None, "after": order | {"id": 2}},
        {"op": "u", "before": order, "after": order | {"state": "paid"}},
        {"op": "d", "before": order | {"id": 2}, "after": None},
    ]
    produce(servers, topic, [json.dumps(envelope).encode() for envelope in envelopes])

    def rows() -> list[tuple[Any, ...]]:
        return postgres.query(url, "SELECT id, state, cents FROM orders_copy")

    run_until(tmp_path, "cdc_to_postgres", {"orders": topic}, rows, [(1, "paid", 500)])


@pytest.mark.servers
def test_what_cannot_be_read_or_written_is_in_tables_of_dead_letters(
    tmp_path: Path, servers: str, kafka_topic: TopicFactory
) -> None:
    topic, url = kafka_topic(), os.environ["POSTGRES_URL"]
    postgres.query(
        url, "CREATE TABLE payments (id bigint NOT NULL, account varchar(3), amount bigint)"
    )
    good, too_long = {"id": 1, "account": "a", "amount": 1}, {"id": 2, "account": "abcd"}
    produce(servers, topic, [json.dumps(good).encode(), b"{", json.dumps(too_long).encode()])

    def rows() -> list[Any]:
        return [
            postgres.query(url, "SELECT id FROM payments"),
            postgres.query(url, 'SELECT operator, topic, "offset" FROM bad_records'),
            postgres.query(url, "SELECT operator FROM bad_rows"),
        ]

    expected = [[(1,)], [("payments", topic, 1)], [("table",)]]
    run_until(tmp_path, "dead_letters", {"payments": topic}, rows, expected)


@pytest.mark.servers
def test_a_running_ledger_adds_up(tmp_path: Path, payments: str) -> None:
    url = os.environ["POSTGRES_URL"]

    def rows() -> list[tuple[Any, ...]]:
        return postgres.query(
            url,
            "SELECT account, max(n), max(largest) FROM ledger GROUP BY account ORDER BY account",
        )

    expected = [("a0", 20, 570), ("a1", 20, 580), ("a2", 20, 590)]
    run_until(tmp_path, "running_ledger", {"payments": payments}, rows, expected)
    balances = postgres.query(url, "SELECT balance FROM ledger WHERE n = 20 ORDER BY account")
    assert balances == [
        (sum(one["amount"] for one in PAYMENTS if one["account"] == f"a{n}"),) for n in range(3)
    ]


@pytest.mark.servers
def test_windows_hold_the_totals_of_each_minute(
    tmp_path: Path, servers: str, kafka_topic: TopicFactory
) -> None:
    topic, url = kafka_topic(), os.environ["POSTGRES_URL"]
    moments = ("12:00:10", "12:00:50", "12:01:30", "12:05:00")
    produce(
        servers,
        topic,
        [
            json.dumps({"id": n, "account": "a", "amount": 10, "at": f"2026-01-01T{at}Z"}).encode()
            for n, at in enumerate(moments)
        ],
    )

    def rows() -> list[tuple[Any, ...]]:
        return postgres.query(
            url,
            "SELECT to_char(window_start AT TIME ZONE 'UTC', 'HH24:MI'), total, payments"
            " FROM totals ORDER BY 1",
        )

    # The last minute is not over: no later record says so.
    run_until(tmp_path, "windows", {"payments": topic}, rows, [("12:00", 20, 2), ("12:01", 10, 1)])


@pytest.mark.servers
def test_two_topics_are_one_stream_into_two_targets(
    tmp_path: Path, servers: str, payments: str, kafka_topic: TopicFactory
) -> None:
    returns, url = kafka_topic(), os.environ["POSTGRES_URL"]
    produce(servers, returns, [b'{"id": 1000, "account": "a0", "amount": 5}'])

    def rows() -> list[Any]:
        archived = ds.dataset(tmp_path / "data" / "archive", format="json").to_table()
        return [
            postgres.query(url, "SELECT count(*), min(amount) FROM payments"),
            (archived.num_rows, min(archived.column("amount").to_pylist())),
        ]

    topics = {"payments": payments, "returns": returns}
    run_until(tmp_path, "two_targets", topics, rows, [[(61, -5)], (61, -5)])


def test_every_example_is_run_by_a_test() -> None:
    text = Path(__file__).read_text()
    assert [one.stem for one in EXAMPLES.glob("*.toml") if f'"{one.stem}' not in text] == []
