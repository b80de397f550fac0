"""The example from a Postgres table to an Iceberg table: kills, and a hash of both."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from examples import postgres_to_iceberg as example
from pyiceberg.catalog import load_catalog

from onceflow.integration.servers.postgres import EmbeddedPostgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_copy_equals_the_table_and_a_change_that_it_lacks_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "ROWS", 50_000)
    with EmbeddedPostgres({"wal_level": "logical"}) as server:
        example.fill(server.url)
        changes = example.survive(server.url, str(tmp_path))
        assert changes > 100
        table = example.read_table(server.url)
        with load_catalog("default", **example.catalog_of(str(tmp_path))) as catalog:
            assert example.read_copy(catalog) == table
            with psycopg.connect(server.url) as connection:
                connection.execute("UPDATE orders SET cents = cents + 0.01 WHERE id = 1 OR id = 2")
            assert example.read_copy(catalog) != example.read_table(server.url)
