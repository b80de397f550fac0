"""Values of PostGIS: the source's first copy, its stream and the sink keep each bit of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.rows import TupleRow
from tests.integration.postgres_changes_kit import CONTEXT, source_of, wait_until
from tests.integration.postgres_sink_kit import Job
from tests.support.servers.debian import is_debian
from tests.support.servers.postgis import UnpackedPostgres, find_postgis

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import SourceReader
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sinks import PostgresSink

pytestmark = [
    pytest.mark.servers,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_debian(), reason="no apt-get and dpkg-deb, which fetch PostGIS"),
]

_COLUMNS = {
    "g": "geometry",
    "p": "geometry(PointZM, 4326)",
    "e": "geography",
    "l": "geography(LineString, 4326)",
    "many": "geometry[]",
}
_GEOMETRIES = (
    "POINT(0.1 -0)",
    "POINT(1e-320 1.7976931348623157e308)",
    "POINT(0.30000000000000004 100000000000000000.5)",
    "SRID=4326;POINT Z (1 2 3)",
    "SRID=3857;POINT M (1 2 0.1)",
    "POINT ZM (1 2 3 4)",
    "POINT EMPTY",
    "POINT Z EMPTY",
    "SRID=4326;GEOMETRYCOLLECTION EMPTY",
    "POLYGON((0 0,1 0,1 1,0 0),(0.1 0.1,0.2 0.1,0.2 0.2,0.1 0.1))",
    "SRID=4326;GEOMETRYCOLLECTION(POINT(1 2),LINESTRING EMPTY,MULTIPOINT(1 1,2 2))",
    "CIRCULARSTRING(0 0,1 1,2 0)",
    "CURVEPOLYGON(CIRCULARSTRING(0 0,4 0,4 4,0 4,0 0))",
    "TIN(((0 0 0,0 0 1,0 1 0,0 0 0)))",
    "POLYHEDRALSURFACE(((0 0 0,0 0 1,0 1 1,0 0 0)))",
)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    # Texts of floats must not depend on the setting.
    options = {"wal_level": "logical", "extra_float_digits": "-15"}
    with UnpackedPostgres(find_postgis(), options) as running:
        with psycopg.connect(running.url, autocommit=True) as connection:
            connection.execute("CREATE EXTENSION postgis")
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        yield connection
        active = "SELECT FROM pg_replication_slots WHERE active"
        wait_until(lambda: not connection.execute(active).fetchall())
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        connection.execute("DROP PUBLICATION IF EXISTS onceflow_job_t")
        connection.execute("DROP TABLE IF EXISTS t, copy")


def _fill(database: psycopg.Connection[TupleRow], first: int) -> None:
    for at, text in enumerate(_GEOMETRIES):
        database.execute(
            "INSERT INTO t VALUES (%s, %s, %s, %s, %s, ARRAY[%s::geometry, NULL])",
            [
                first + at,
                text,
                "SRID=4326;POINT ZM (0.1 -0 3 4)" if at else "SRID=4326;POINT ZM EMPTY",
                "SRID=4326;POINT Z (-179.99999999999997 89.9 0.1)",
                "LINESTRING(0.1 0.2,0.3 0.4)" if at else None,
                text,
            ],
        )


def _read(reader: SourceReader, count: int) -> list[pa.RecordBatch]:
    batches: list[pa.RecordBatch] = []

    def is_read() -> bool:
        batch = reader.poll(0.05)
        if isinstance(batch, pa.RecordBatch):
            batches.append(batch)
        return sum(batch.num_rows for batch in batches) >= count

    wait_until(is_read)
    return batches


def _octets(database: psycopg.Connection[TupleRow], table: str) -> list[tuple[Any, ...]]:
    """Return the values as the server stores them: EWKB, with SRID, Z and M."""
    return database.execute(
        "SELECT id, ST_AsEWKB(g), ST_AsEWKB(p), ST_AsEWKB(e::geometry), ST_AsEWKB(l::geometry),"
        f" ST_AsEWKB(many[1]), array_length(many, 1), g::bytea FROM {table} ORDER BY id".encode()
    ).fetchall()


def test_a_copy_of_geometries_equals_the_original(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    columns = ", ".join(f"{name} {kind}" for name, kind in _COLUMNS.items())
    database.execute(f"CREATE TABLE t (id int PRIMARY KEY, {columns})".encode())
    database.execute("CREATE TABLE copy (LIKE t INCLUDING ALL)")
    _fill(database, 0)
    source = source_of(server)
    count = len(_GEOMETRIES)
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        batches = _read(reader, count)
        _fill(database, 100)
        database.execute("UPDATE t SET id = id + 1000 WHERE id < 2")
        database.execute("DELETE FROM t WHERE id = 101")
        batches += _read(reader, count + 5)
    sink = PostgresSink(
        server.url,
        table="copy",
        write_mode="upsert",
        primary_key=("id",),
        operation_column="_op",
        delivery="at_least_once",
    )
    with Job(sink, schema=batches[0].schema) as job:
        writer = job.check().writer()
        for batch in batches:
            writer.write(batch)
        writer.pre_commit(CheckpointId(1))
    original = _octets(database, "t")
    assert len(original) == 2 * count - 1
    assert _octets(database, "copy") == original


@pytest.mark.parametrize("kind", ["box2d", "box3d", "box3d[]"])
def test_a_type_whose_text_is_rounded_is_refused_at_the_start(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], kind: str
) -> None:
    database.execute(f"CREATE TABLE t (id int PRIMARY KEY, b {kind})".encode())
    with pytest.raises(ConfigError, match="'b' of table public.t has type box"):
        source_of(server).splits()
    sink = PostgresSink(server.url, table="t", delivery="at_least_once")
    schema = pa.schema([("id", pa.int32()), ("b", pa.string())])
    with pytest.raises(ConfigError, match="box"), Job(sink, schema=schema) as job:
        job.check()
