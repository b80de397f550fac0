"""The embedded servers do what tests of crashes rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from onceflow.integration import servers
from onceflow.integration.faults import is_alive, process_tree
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.postgres import AsNobody


@pytest.fixture
def postgres() -> Iterator[servers.EmbeddedPostgres]:
    with servers.EmbeddedPostgres() as server:
        yield server


@pytest.fixture(scope="module")
def kafka() -> Iterator[servers.EmbeddedKafka]:
    with servers.EmbeddedKafka() as server:
        yield server


def _produce(bootstrap_servers: str, topic: str, values: list[bytes]) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers, "acks": "all"})
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(20) == 0


def _consume(
    bootstrap_servers: str, topic: str, count: int, timeout_s: float = 90.0
) -> list[bytes]:
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "test"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    messages = consumer.consume(count, timeout_s)
    consumer.close()
    return [value for message in messages if (value := message.value()) is not None]


def test_prepared_transaction_survives_kill_of_every_postgres_process(
    postgres: servers.EmbeddedPostgres,
) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (i int)")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("PREPARE TRANSACTION 'x'")
        connection.execute("INSERT INTO t VALUES (2)")
        pid = postgres.pid
        assert pid is not None
        tree = process_tree(pid)
        assert len(tree) > 3, "backends and helpers belong to the tree"
        postgres.kill()
        assert not any(is_alive(member) for member in tree)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    postgres.start()
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("COMMIT PREPARED 'x'")
        assert connection.execute("SELECT i FROM t ORDER BY i").fetchall() == [(1,), (2,)]


def test_embedded_postgres_is_durable_and_takes_prepared_transactions(
    postgres: servers.EmbeddedPostgres,
) -> None:
    with psycopg.connect(postgres.url) as connection:
        settings = connection.execute(
            "SELECT name, setting FROM pg_settings WHERE name IN ('fsync', "
            "'synchronous_commit', 'full_page_writes', 'max_prepared_transactions') ORDER BY name"
        ).fetchall()
    assert settings == [
        ("fsync", "on"),
        ("full_page_writes", "on"),
        ("max_prepared_transactions", "64"),
        ("synchronous_commit", "on"),
    ]


def test_paused_postgres_answers_nothing_and_goes_on_in_the_same_session(
    postgres: servers.EmbeddedPostgres,
) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        session = connection.info.backend_pid
        postgres.pause()
        started = time.monotonic()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(postgres.url, connect_timeout=2)
        assert time.monotonic() - started >= 1.9, "it must hang, and not refuse"
        postgres.unpause()
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row == (session,)


def test_paused_postgres_can_be_killed(postgres: servers.EmbeddedPostgres) -> None:
    postgres.pause()
    postgres.restart()
    with psycopg.connect(postgres.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_stop_keeps_a_directory_of_the_caller_and_deletes_its_own(tmp_path: Path) -> None:
    with (
        servers.EmbeddedPostgres(directory=tmp_path) as server,
        psycopg.connect(server.url, autocommit=True) as connection,
    ):
        connection.execute("CREATE TABLE kept AS SELECT 7 AS i")
    with (
        servers.EmbeddedPostgres(directory=tmp_path) as server,
        psycopg.connect(server.url) as connection,
    ):
        assert connection.execute("SELECT i FROM kept").fetchone() == (7,)
    with servers.EmbeddedPostgres() as server:
        own = server.directory
        assert own.is_dir()
    assert not own.exists()


def test_server_that_cannot_start_is_refused_with_its_own_words(tmp_path: Path) -> None:
    server = servers.EmbeddedPostgres({"max_prepared_transactions": "many"}, tmp_path)
    with pytest.raises(servers.ServerError, match=r"invalid value for parameter.*many"):
        server.start()
    assert server.pid is None


def test_server_on_a_port_of_somebody_else_is_refused(postgres: servers.EmbeddedPostgres) -> None:
    other = servers.EmbeddedPostgres()
    other.port = postgres.port
    try:
        with pytest.raises(
            servers.ServerError, match=r"another process took the port|ended with status"
        ):
            other.start()
    finally:
        other.stop()


def test_hba_lines_refuse_a_wrong_password() -> None:
    lines = ["host all guarded 127.0.0.1/32 scram-sha-256"]
    with servers.EmbeddedPostgres(hba_lines=lines) as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("CREATE ROLE guarded LOGIN PASSWORD 'right'")
        guarded = server.url.replace("postgres@", "guarded:{}@", 1)
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(guarded.format("wrong"))
        psycopg.connect(guarded.format("right")).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_postgres_runs_as_nobody_where_user_namespaces_are_not_allowed() -> None:
    with servers.EmbeddedPostgres(launcher=AsNobody()) as server:
        server.restart()
        with psycopg.connect(server.url) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)


def test_servers_do_not_outlive_a_killed_owner() -> None:
    program = (
        "import time\n"
        "from onceflow.integration.servers import EmbeddedPostgres\n"
        "server = EmbeddedPostgres().start()\n"
        "print(server.pid, server.directory, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": "src"},
        cwd=Path(__file__).parents[2],
    ) as owner:
        assert owner.stdout is not None
        pid, directory = owner.stdout.readline().split()
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 90
    while is_alive(int(pid)) or Path(directory).exists():
        assert time.monotonic() < deadline, f"{pid} or {directory} is left"
        time.sleep(0.02)


def test_records_survive_kill_of_kafka_and_leaders_are_back_when_start_returns(
    kafka: servers.EmbeddedKafka,
) -> None:
    topic = kafka.create_topic("survives", 1)
    _produce(kafka.bootstrap_servers, topic, [b"before"])
    started = time.monotonic()
    kafka.restart()
    elapsed_s = time.monotonic() - started
    _produce(kafka.bootstrap_servers, topic, [b"after"])
    assert _consume(kafka.bootstrap_servers, topic, 2) == [b"before", b"after"]
    assert elapsed_s < 90


def test_paused_kafka_delivers_only_after_unpause(kafka: servers.EmbeddedKafka) -> None:
    topic = kafka.create_topic("paused", 1)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "acks": "all"})
    kafka.pause()
    producer.produce(topic, b"held")
    assert producer.flush(1) == 1
    kafka.unpause()
    assert producer.flush(20) == 0
    assert _consume(kafka.bootstrap_servers, topic, 1) == [b"held"]


def test_topic_that_exists_is_refused_by_name(kafka: servers.EmbeddedKafka) -> None:
    kafka.create_topic("twice", 2)
    with pytest.raises(servers.ServerError, match=r"twice.*already exists"):
        kafka.create_topic("twice", 2)


def test_fixtures_give_an_empty_database_and_a_topic_of_the_asked_width(
    postgres_database: str, kafka_topic: TopicFactory, onceflow_kafka: servers.KafkaServer
) -> None:
    with psycopg.connect(postgres_database, autocommit=True) as connection:
        tables = connection.execute(
            "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
        ).fetchone()
        assert tables == (0,)
        # Left in doubt on purpose: the fixture must clean up behind a failed test.
        connection.execute("CREATE TABLE t (i int)")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("PREPARE TRANSACTION 'left behind'")
    topic = kafka_topic(3)
    consumer = Consumer({"bootstrap.servers": onceflow_kafka.bootstrap_servers, "group.id": "x"})
    metadata = consumer.list_topics(topic, timeout=10)
    consumer.close()
    assert len(metadata.topics[topic].partitions) == 3
