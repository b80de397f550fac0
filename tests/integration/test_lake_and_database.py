"""One job into two Iceberg tables and Postgres: after each crash all of them get the same numbers.

There is no transaction over the three. What was decided is committed in each before the next
attempt reads anything, so a crash between two of their commits leaves a set that is made whole.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from tests.integration.lake_driver import catalog_properties
from tests.integration.test_lake_jobs import IcebergLakeJob
from tests.support.counting_source import SCHEMA
from typing_extensions import override

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]

_ORDERS, _COPIES = "shop.orders", "shop.copies"


class ThreeTargetsJob(IcebergLakeJob):
    """Writes all rows into `shop.orders`, `shop.copies`, and the table `orders` of Postgres."""

    def __init__(self, directory: Path, database: str) -> None:
        super().__init__(directory)
        self.database = database

    @override
    def _arguments(self) -> tuple[object, ...]:
        return *super()._arguments(), self.database

    def sums_by_checkpoint(self, name: str) -> Mapping[int, tuple[int, int]]:
        """Return, of each snapshot with rows, how many and the sum of their amounts."""
        amounts: dict[int, list[int]] = {}
        with closing(load_catalog("default", **catalog_properties(self.directory))) as catalog:
            table = catalog.load_table(name)
            head = table.current_snapshot()
            assert head is not None
            for manifest in head.manifests(table.io):
                for entry in manifest.fetch_manifest_entry(table.io):
                    snapshot = table.snapshot_by_id(entry.snapshot_id or 0)
                    assert snapshot is not None
                    assert snapshot.summary is not None
                    rows = pq.read_table(entry.data_file.file_path.removeprefix("file://"))
                    checkpoint = int(snapshot.summary["onceflow.checkpoint"] or 0)
                    amounts.setdefault(checkpoint, []).extend(rows["amount"].to_pylist())
        return {checkpoint: (len(some), sum(some)) for checkpoint, some in amounts.items()}

    def read_database(self) -> pa.Table:
        with psycopg.connect(self.database) as connection:
            rows: list[Any] = connection.execute("SELECT * FROM orders").fetchall()
        return pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows])

    def assert_targets_agree(self) -> None:
        """Have the same rows in all three, and in both tables the same numbers a checkpoint."""
        self.assert_each_row_once()
        assert self.sums_by_checkpoint(_ORDERS) == self.sums_by_checkpoint(_COPIES)
        in_lake = self.read()[0].select(SCHEMA.names).sort_by("id")
        assert in_lake.to_pydict() == self.read_database().sort_by("id").to_pydict()


@pytest.fixture
def job(postgres_database: str, tmp_path: Path) -> Iterator[ThreeTargetsJob]:
    made = ThreeTargetsJob(tmp_path, postgres_database)
    yield made
    made.close()


def test_two_tables_and_postgres_say_the_same_after_kills_before_between_and_after_their_commits(
    job: ThreeTargetsJob,
) -> None:
    for moment in ("kill-before", "kill-after", "kill-after"):
        driver = job.start()
        job.wait_for_commits(2, driver)
        job.order(moment)
        assert driver.wait(120) == -signal.SIGKILL
    driver = job.start()
    job.wait_for_commits(1, driver)
    driver.kill()
    job.finish(job.start())
    job.assert_targets_agree()
    job.assert_nothing_is_staged()
