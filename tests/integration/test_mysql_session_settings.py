"""Settings that a server gives to all sessions, and that no session of onceflow keeps."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pyarrow as pa
import pytest
from tests.integration.mysql_sink_kit import Job, ids_in, query
from tests.integration.sink_kit import rows

from onceflow.clients.sql.tables import TableName
from onceflow.connectors.spark.readers.mysql_rows import MySQLRows
from onceflow.core.errors import BadRow
from onceflow.core.protocol.committables import Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.integration.servers import EmbeddedMariaDB, EmbeddedMySQL
from onceflow.integration.servers.mysql import MySQLAdmin
from onceflow.sinks import MySQLSink

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module", params=[EmbeddedMySQL, EmbeddedMariaDB])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedMySQL | EmbeddedMariaDB]:
    """A server of the module's own: its settings are those of all its sessions."""
    with request.param() as running:
        yield running


@pytest.fixture
def database(server: EmbeddedMySQL | EmbeddedMariaDB) -> str:
    name = f"d{uuid.uuid4().hex[:12]}"
    with MySQLAdmin.session(server.url) as admin:
        admin.create_database(name)
    return server.database_url(name)


@pytest.mark.parametrize(
    "setting",
    ["autocommit = 0", "sql_select_limit = 1", "completion_type = 1", "completion_type = 2"],
)
def test_rows_are_written_once_whatever_a_server_gives_its_sessions(
    database: str, setting: str
) -> None:
    name = setting.partition(" ")[0]
    query(database, f"SET GLOBAL {setting}")
    try:
        sink = MySQLSink(database, table="ledger", create=True, commit_mode="two_phase")
        with Job(sink) as job:
            writer, committer = job.check().writer(), job.committer()
            for checkpoint in (1, 2, 3):
                writer.write(rows([checkpoint, checkpoint + 10]))
                (committable,) = writer.pre_commit(CheckpointId(checkpoint))
                assert committer.commit(committable) == Committed()
    finally:
        query(database, f"SET GLOBAL {name} = DEFAULT")
    assert ids_in(database) == [1, 2, 3, 11, 12, 13]


def test_every_row_of_a_table_is_read_whatever_limit_a_server_gives_its_sessions(
    database: str,
) -> None:
    query(database, "CREATE TABLE t (id bigint PRIMARY KEY)", "INSERT INTO t VALUES (1), (2), (3)")
    query(database, "SET GLOBAL sql_select_limit = 1")
    try:
        source = MySQLRows(MySQLSink(database, table="t").endpoint, TableName(None, "t"))
        batches = list(source.batches("SELECT id FROM t", source.columns(), ""))
    finally:
        query(database, "SET GLOBAL sql_select_limit = DEFAULT")
    found = [row["id"] for batch in batches for row in batch.to_pylist()]
    assert sorted(found) == [1, 2, 3]


_TEXTS = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.large_string())])


def _texts(*sizes: int) -> pa.RecordBatch:
    values = [pa.array(range(len(sizes))), pa.array(["x" * size for size in sizes], _TEXTS[1].type)]
    return pa.RecordBatch.from_arrays(values, schema=_TEXTS)


def _upsert(database: str) -> MySQLSink:
    """Return a sink whose rows stand in statements; inserts may stand in files."""
    return MySQLSink(
        database, table="t", write_mode="upsert", primary_key=("id",), commit_mode="two_phase"
    )


@pytest.fixture
def small_packets(database: str) -> Iterator[None]:
    """Sessions that take statements of a megabyte at most."""
    query(database, "SET GLOBAL max_allowed_packet = 1048576")
    yield
    query(database, "SET GLOBAL max_allowed_packet = DEFAULT")


@pytest.mark.usefixtures("small_packets")
def test_rows_are_split_into_statements_that_the_server_takes(database: str) -> None:
    query(database, "CREATE TABLE t (id bigint PRIMARY KEY, v longtext)")
    sink = _upsert(database)
    sizes = [10, 900_000, 400_000, 700_000, *([3000] * 1500)]
    with Job(sink, schema=_TEXTS) as job:
        writer = job.check().writer()
        writer.write(_texts(*sizes))
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert job.committer().commit(committable) == Committed()
    assert query(database, "SELECT length(v) FROM t ORDER BY id") == [(size,) for size in sizes]


@pytest.mark.usefixtures("small_packets")
def test_a_row_that_no_statement_can_hold_is_refused_by_the_setting(database: str) -> None:
    query(database, "CREATE TABLE t (id bigint PRIMARY KEY, v longtext)")
    sink = _upsert(database)
    with Job(sink, schema=_TEXTS) as job:
        writer = job.check().writer()
        writer.write(_texts(10, 3_000_000))
        with pytest.raises(BadRow, match="max_allowed_packet = 1048576"):
            writer.pre_commit(CheckpointId(1))
