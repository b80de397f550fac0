"""Whole jobs that follow a table under random transactions, while slots, driver and servers die."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError
from tests.integration import postgres_sink_kit as postgres
from tests.integration.kafka_sink_kit import messages
from tests.support.driver_process import DriverProcess
from tests.support.random_load import RandomLoad, create_original, replay
from tests.support.random_load_process import catalog_of

from onceflow.integration.faults import processes
from onceflow.integration.servers.kafka import EmbeddedKafka
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.integration.servers.process import ServerProcess

_TIMEOUT_S = 180
_PROGRAM = "tests.support.random_load_process"
_DIGEST = """
    SELECT count(*), md5(coalesce(string_agg(md5(row(id, v, n, big)::text), '' ORDER BY id), ''))
    FROM {}
"""


class KilledJob:
    """A job on `server`, and the kills of its processes and servers."""

    def __init__(
        self, server: EmbeddedPostgres, driver: DriverProcess, directory: Path, target: str
    ) -> None:
        self._server, self._driver = server, driver
        self._arguments: list[str | Path] = [
            directory, "--url", server.url, "--target", target
        ]  # fmt: skip
        create_original(server.url)

    def launch(self) -> None:
        self._driver.launch(_PROGRAM, self._arguments, {})

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, self._driver.log_tail()
            assert self._driver.exit_status is None, self._driver.log_tail()
            time.sleep(0.1)

    def wait_for_decision(self) -> None:
        """Wait until the slot moves: the job has decided a checkpoint. Fails after a time limit."""
        before = self._decided()
        self.wait_until(lambda: self._decided() not in ("", before))

    def _decided(self) -> str:
        """Return where the slot stands, which moves after decisions alone; empty without a slot."""
        slots = postgres.query(
            self._server.url, "SELECT confirmed_flush_lsn::text FROM pg_replication_slots"
        )
        return str(slots[0][0]) if slots and slots[0][0] else ""

    def kill_all_in_turn(self, draw: random.Random, others: tuple[ServerProcess, ...] = ()) -> None:
        """Kill the slots, each server and the driver, with decisions between, and run on."""
        kills: list[Callable[[], None]] = [self._kill_slots, self._kill_driver]
        kills += [lambda server=server: _restart(server) for server in (self._server, *others)]  # type: ignore[misc]
        draw.shuffle(kills)
        for kill in kills:
            self.wait_for_decision()
            time.sleep(draw.uniform(0.0, 0.4))
            kill()
        self.wait_for_decision()

    def _kill_slots(self) -> None:
        # The job restarts them by itself.
        for slot in processes.children_of(self._driver.pid):
            processes.kill_process(slot)

    def _kill_driver(self) -> None:
        self._driver.kill()
        self.launch()


def _restart(server: ServerProcess) -> None:
    server.kill()
    server.start()


def _original(url: str) -> dict[int, tuple[Any, ...]]:
    rows = postgres.query(url, "SELECT id, v, n, big FROM original")
    return {row[0]: tuple(row[1:]) for row in rows}


_OTHER_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 21)]


@pytest.mark.only_proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, *_OTHER_SEEDS])
def test_both_tables_are_equal_after_random_transactions_and_kills(
    server: EmbeddedPostgres, driver: DriverProcess, tmp_path: Path, seed: int
) -> None:
    job = KilledJob(server, driver, tmp_path, "postgres")
    postgres.query(
        server.url,
        "CREATE TABLE copy (id bigint PRIMARY KEY, v text, n numeric(10, 2), big text)",
    )
    load = RandomLoad(server.url, seed)
    try:
        job.launch()
        job.kill_all_in_turn(random.Random(seed))
    finally:
        load.stop()
    expected = postgres.query(server.url, _DIGEST.format("original"))
    assert expected[0][0] > 0
    job.wait_until(lambda: postgres.query(server.url, _DIGEST.format("copy")) == expected)
    assert load.transactions > 50


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_iceberg_table_equals_the_original_after_random_transactions_and_kills(
    server: EmbeddedPostgres, driver: DriverProcess, tmp_path: Path, seed: int
) -> None:
    job = KilledJob(server, driver, tmp_path, "iceberg")
    load = RandomLoad(server.url, seed)
    try:
        job.launch()
        job.kill_all_in_turn(random.Random(seed))
    finally:
        load.stop()
    expected = _original(server.url)
    job.wait_until(lambda: _read_iceberg(tmp_path) == expected)


def _read_iceberg(directory: Path) -> dict[int, tuple[Any, ...]]:
    with closing(load_catalog("default", **catalog_of(directory))) as catalog:
        try:
            rows = catalog.load_table("shop.copy").scan().to_arrow().to_pylist()
        except NoSuchTableError:
            return {}
    copied = {row["id"]: (row["v"], row["n"], row["big"]) for row in rows}
    assert len(copied) == len(rows), "a key is there twice"
    return copied


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_topic_has_each_change_once_after_random_transactions_and_kills(
    server: EmbeddedPostgres, driver: DriverProcess, tmp_path: Path, seed: int
) -> None:
    """Replayed, each change fits the row before it: none is missing, none is there twice."""
    with EmbeddedKafka() as kafka:
        kafka.create_topic("copy", 2)
        job = KilledJob(server, driver, tmp_path, kafka.bootstrap_servers)
        load = RandomLoad(server.url, seed)
        try:
            job.launch()
            job.kill_all_in_turn(random.Random(seed), (kafka,))
        finally:
            load.stop()
        expected = _original(server.url)
        job.wait_until(lambda: _replay(kafka.bootstrap_servers) == expected)


def _replay(bootstrap_servers: str) -> dict[int, tuple[Any, ...]]:
    changes = (
        json.loads(message.value() or b"", parse_float=Decimal)
        for message in messages(bootstrap_servers, "copy")
    )
    return replay({**change, "n": Decimal(change["n"] or 0)} for change in changes)


def test_the_load_changes_rows_in_every_way(server: EmbeddedPostgres) -> None:
    """The jobs above would hold of a load that changes nothing."""
    create_original(server.url)
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
        load = RandomLoad(server.url, 1)
        deadline = time.monotonic() + _TIMEOUT_S
        while load.transactions < 300 and time.monotonic() < deadline:
            time.sleep(0.05)
        load.stop()
        peek = "SELECT data FROM pg_logical_slot_peek_changes('s', NULL, NULL)"
        seen = " ".join(str(data) for (data,) in connection.execute(peek).fetchall())
    for kind in ("INSERT:", "UPDATE: old-key:", "DELETE:", "message:"):
        assert kind in seen, kind
    log = server.log_path.read_text()
    assert "ERROR" not in log.replace("ERROR:  canceling statement due to lock timeout", ""), log
