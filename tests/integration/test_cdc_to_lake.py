"""Copies of a table in lake tables, kept by what Debezium says of it, through kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Generator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka.admin import AdminClient
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError
from tests.integration import postgres_sink_kit as postgres
from tests.integration.cdc_lake_driver import JOB, TABLE, catalog_of
from tests.integration.test_cdc_upsert import change_rows
from tests.support.debezium import debezium
from tests.support.program import Program, python
from tests.support.waiting import await_true

from onceflow.integration.servers.kinds import KafkaServer
from onceflow.integration.servers.postgres import EmbeddedPostgres

_PROGRAM = Path(__file__).with_name("cdc_lake_driver.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class CopiesJob:
    """The drivers of the job, one after another, and what readers of both copies see."""

    def __init__(self, directory: Path, servers: str, topic: str) -> None:
        self.directory, self._arguments = directory, (servers, topic, str(directory))

    @contextmanager
    def running(self) -> Generator[Program, None, None]:
        """Have a driver run, and get SIGKILL at the end of the block."""
        with Program(self.directory / "driver.log", *python(_PROGRAM, *self._arguments)) as driver:
            yield driver
            assert not driver.poll(), driver.tail()

    def kill_slot(self) -> None:
        status = self._ask("status", "--json")
        os.kill(json.loads(status)["slots"][0]["pid"], signal.SIGKILL)

    def stop(self) -> None:
        """Have the job commit what waits, and end."""
        self._ask("stop")

    def read_iceberg(self) -> list[dict[str, Any]]:
        with closing(load_catalog("default", **catalog_of(str(self.directory)))) as catalog:
            try:
                return _sort(catalog.load_table(TABLE).scan().to_arrow().to_pylist())
            except NoSuchTableError:
                return []

    def read_delta(self) -> list[dict[str, Any]]:
        try:
            table = DeltaTable(self.directory / "delta")
        except TableNotFoundError:
            return []
        return _sort(cast("Any", table).to_pyarrow_table().to_pylist())

    def count_versions(self) -> int:
        """Return how many versions both tables have had."""
        with closing(load_catalog("default", **catalog_of(str(self.directory)))) as catalog:
            snapshots = catalog.load_table(TABLE).snapshots()
        return len(snapshots) + DeltaTable(self.directory / "delta").version()

    def _ask(self, *arguments: str) -> str:
        program = [sys.executable, "-m", "onceflow.cli.main", *arguments, JOB]
        storage = str(self.directory / "checkpoints")
        return subprocess.check_output([*program, "--storage", storage], text=True, timeout=120)


def _sort(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["id"])


def test_copies_in_iceberg_and_delta_equal_the_table_that_debezium_follows_through_kills(
    tmp_path: Path, onceflow_kafka: KafkaServer
) -> None:
    """Rows that were there before, changes of every kind, also of keys; slots and drivers die."""
    seed = int(os.environ.get("ONCEFLOW_TEST_SEED", random.randrange(2**32)))
    said, draw = f"ONCEFLOW_TEST_SEED={seed}", random.Random(seed)
    servers, prefix = onceflow_kafka.bootstrap_servers, f"shop{uuid.uuid4().hex[:8]}"
    with EmbeddedPostgres({"wal_level": "logical"}) as server:
        url = server.url
        postgres.query(url, "CREATE TABLE orders (id bigint PRIMARY KEY, state text, cents bigint)")

        change = partial(change_rows, url, draw)

        def truth() -> list[dict[str, Any]]:
            rows = postgres.query(url, "SELECT id, state, cents FROM orders")
            return _sort([dict(zip(("id", "state", "cents"), row, strict=True)) for row in rows])

        def await_copies() -> None:
            rows = truth()
            await_true(
                lambda: job.read_iceberg() == rows and job.read_delta() == rows,
                said,
                timeout_s=180,
            )

        change(100)
        with debezium(
            tmp_path, url, servers, table="public.orders", prefix=prefix, schemas=seed % 2 == 0
        ):
            admin, topic = AdminClient({"bootstrap.servers": servers}), f"{prefix}.public.orders"
            await_true(lambda: topic in admin.list_topics(timeout=30).topics, "no topic")
            job = CopiesJob(tmp_path, servers, topic)
            with job.running():
                await_copies()
                change(100)
                job.kill_slot()
                change(100)
            for _ in range(3):
                versions = job.count_versions()
                with job.running():
                    change(60)
                    # A claim of each table, and a version with rows at least.
                    await_true(lambda: job.count_versions() > versions + 2, said)
            with job.running() as driver:
                change(60)
                await_copies()
                job.stop()
                assert driver.wait(60) == 0
