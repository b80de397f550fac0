"""A table of a real Postgres that is altered, partitioned or emptied while it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest
from psycopg.rows import TupleRow
from tests.integration.postgres_changes_kit import (
    CONTEXT,
    CREATE_TABLE,
    drop_slots,
    open_database,
    read_rows,
    read_to_error,
    source_of,
)
from tests.support.waiting import await_true

from onceflow.core.errors import BadRecord, ConfigError, OffsetOutOfRange
from onceflow.core.spi import Split
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sources import PostgresChanges
from onceflow.sources.postgres import reader as postgres_reader


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres({"wal_level": "logical"}) as running:
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with open_database(server, CREATE_TABLE) as connection:
        yield connection


_CHANGES = """
    INSERT INTO t (id, v) VALUES (1, 'a'), (2, 'b');
    UPDATE t SET v = 'c' WHERE id = 1;
    UPDATE t SET id = 3 WHERE id = 2;
    DELETE FROM t WHERE id = 1
"""
_EXPECTED = [("c", 1, "a"), ("c", 2, "b"), ("u", 1, "c"), ("d", 2), ("u", 3, "b"), ("d", 1)]


def _shown(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return each operation with its row; a delete with its key alone."""
    return [
        (row["_op"], row["id"]) if row["_op"] == "d" else (row["_op"], row["id"], row["v"])
        for row in rows
    ]


@pytest.mark.parametrize(
    "identity",
    ["DEFAULT", "FULL", "USING INDEX by_id"],
)
def test_every_replica_identity_gives_the_same_changes(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], identity: str
) -> None:
    database.execute("CREATE UNIQUE INDEX by_id ON t (id)")
    database.execute(f"ALTER TABLE t REPLICA IDENTITY {identity}".encode())
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute(_CHANGES)
        assert _shown(read_rows(reader, len(_EXPECTED))) == _EXPECTED


def test_another_replica_identity_stops_the_job_before_a_key_is_missing(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """The old key would be missing: the target would keep the row under it."""
    database.execute("ALTER TABLE t ADD code int UNIQUE NOT NULL DEFAULT 0")
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'a', 10)")
        assert len(read_rows(reader, 1)) == 1
        database.execute("ALTER TABLE t REPLICA IDENTITY USING INDEX t_code_key")
        database.execute("UPDATE t SET id = 2 WHERE id = 1")
        with pytest.raises(BadRecord, match="has another replica identity"):
            read_to_error(reader)


def test_a_table_that_loses_its_key_refuses_updates_on_the_server(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'a')")
        for statement in ("REPLICA IDENTITY NOTHING", "DROP CONSTRAINT t_pkey"):
            database.execute(f"ALTER TABLE t {statement}".encode())
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
                database.execute("UPDATE t SET v = 'lost'")
        assert _shown(read_rows(reader, 1)) == [("c", 1, "a")]


@pytest.mark.parametrize(
    ("alter", "insert", "reason", "expected"),
    [
        ("DROP COLUMN v", "VALUES (2)", "has no column 'v'", {"id": 2}),
        (
            "RENAME COLUMN v TO w",
            "VALUES (2, 'y')",
            "has no column 'v'",
            {"id": 2, "w": "y"},
        ),
        (
            "ALTER COLUMN v TYPE bytea USING v::bytea",
            "VALUES (2, 'y')",
            "has column 'v' of another type",
            {"id": 2, "v": b"y"},
        ),
    ],
)
def test_a_job_stops_before_altered_columns_and_goes_on_with_them(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    alter: str,
    insert: str,
    reason: str,
    expected: dict[str, Any],
) -> None:
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'x')")
        database.execute(f"ALTER TABLE t {alter}; INSERT INTO t {insert}".encode())
        assert len(read_rows(reader, 1)) == 1
        with pytest.raises(BadRecord, match=reason):
            read_to_error(reader)
        decided = reader.snapshot()
    later = source_of(server, first_copy="none")
    assert later.discover(decided) == decided
    with contextlib.closing(later.reader(decided, CONTEXT)) as reader:
        assert read_rows(reader, 1) == [{**expected, "_op": "c"}]


def test_wider_limits_of_a_column_stop_no_job_and_a_value_beyond_the_old_ones_is_named(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("ALTER TABLE t ADD w numeric(5,2)")
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("ALTER TABLE t ALTER w TYPE numeric(10,4)")
        database.execute("INSERT INTO t VALUES (1, 'x', 1.25)")
        assert len(read_rows(reader, 1)) == 1
        before = reader.snapshot()
        database.execute("INSERT INTO t VALUES (2, 'x', 1.1234)")
        with pytest.raises(BadRecord, match="column 'w'"):
            read_rows(reader, 1)
        assert reader.snapshot() == before
    later = source_of(server, first_copy="none")
    with contextlib.closing(later.reader(before, CONTEXT)) as reader:
        assert str(read_rows(reader, 1)[0]["w"]) == "1.1234"


_CASCADE = """
    CREATE TABLE parent (id int PRIMARY KEY);
    ALTER TABLE t ADD FOREIGN KEY (id) REFERENCES parent NOT VALID;
    TRUNCATE parent CASCADE;
    DROP TABLE parent CASCADE
"""
_UNLOGGED_PARTITION = """
    CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id);
    CREATE UNLOGGED TABLE child PARTITION OF t FOR VALUES FROM (0) TO (9)
"""


@pytest.mark.parametrize(
    "statement",
    ["TRUNCATE t", "TRUNCATE t RESTART IDENTITY", _CASCADE],
    ids=["plain", "restart", "cascade"],
)
def test_a_truncate_ends_the_job_by_name(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], statement: str
) -> None:
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'a')")
        assert len(read_rows(reader, 1)) == 1
        before = reader.snapshot()
        database.execute(statement.encode())
        with pytest.raises(BadRecord, match=r"table public\.t was truncated"):
            read_to_error(reader)
        assert reader.snapshot() == before


def test_a_renamed_table_is_read_on_and_its_new_name_starts_the_job(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgres_reader, "PUBLICATION_CHECK_S", 0.0)
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'a')")
        assert len(read_rows(reader, 1)) == 1
        database.execute("ALTER TABLE t RENAME TO u; INSERT INTO u VALUES (2, 'b')")
        assert _shown(read_rows(reader, 1)) == [("c", 2, "b")]
        decided = reader.snapshot()
    with pytest.raises(ConfigError, match="there is no table t"):
        source_of(server).discover(decided)
    database.execute("INSERT INTO u VALUES (3, 'c')")
    renamed = source_of(server, table="u")
    assert renamed.discover(decided) == decided
    with contextlib.closing(renamed.reader(decided, CONTEXT)) as reader:
        assert _shown(read_rows(reader, 1)) == [("c", 3, "c")]


def test_a_dropped_table_ends_the_job(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server sends nothing about it."""
    monkeypatch.setattr(postgres_reader, "PUBLICATION_CHECK_S", 0.0)
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        reader.poll(0.05)
        database.execute("DROP TABLE t")
        with pytest.raises(OffsetOutOfRange, match="no longer sends every change"):
            read_to_error(reader)


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        ("CREATE UNLOGGED TABLE t (id int PRIMARY KEY)", "it is unlogged.*SET LOGGED"),
        (_UNLOGGED_PARTITION, "its partition child is unlogged"),
        (
            "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE child () INHERITS (t)",
            "which inherits from it",
        ),
    ],
)
def test_tables_with_rows_outside_of_their_stream_are_refused(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    statements: str,
    reason: str,
) -> None:
    database.execute(f"DROP TABLE t; {statements}".encode())
    with pytest.raises(ConfigError, match=reason):
        source_of(server).splits()
    assert database.execute("SELECT FROM pg_publication").fetchall() == []


def test_programs_messages_origins_types_and_subtransactions_change_no_row(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("CREATE TYPE mood AS ENUM ('good'); ALTER TABLE t ADD w mood")
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("SELECT pg_logical_emit_message(false, 'app', 'outside')")
        database.execute("SELECT pg_replication_origin_create('far')")
        database.execute("SELECT pg_replication_origin_session_setup('far')")
        database.execute(
            "BEGIN; SELECT pg_logical_emit_message(true, 'app', 'inside');"
            "INSERT INTO t VALUES (1, 'a', 'good'); SAVEPOINT one; INSERT INTO t VALUES (2, 'b');"
            "SAVEPOINT two; UPDATE t SET v = 'lost'; ROLLBACK TO SAVEPOINT one;"
            "INSERT INTO t VALUES (3, 'c', 'good'); COMMIT"
        )
        database.execute("SELECT pg_replication_origin_session_reset()")
        database.execute("SELECT pg_replication_origin_drop('far')")
        assert _shown(read_rows(reader, 2)) == [("c", 1, "a"), ("c", 3, "c")]
    database.execute("ALTER TABLE t DROP w; DROP TYPE mood")


def _partition(database: psycopg.Connection[TupleRow]) -> None:
    database.execute(
        "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
        "CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (100);"
        # Its columns have another order.
        "CREATE TABLE high (v text, gone int, id int PRIMARY KEY); ALTER TABLE high DROP gone;"
        "ALTER TABLE t ATTACH PARTITION high FOR VALUES FROM (100) TO (200)"
    )


def test_a_row_that_moves_to_another_partition_is_a_delete_and_an_insert(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    _partition(database)
    database.execute("INSERT INTO t VALUES (1, 'a'), (101, 'b')")
    source = source_of(server)
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        assert _shown(read_rows(reader, 2)) == [("r", 1, "a"), ("r", 101, "b")]
        database.execute("UPDATE t SET id = 102 WHERE id = 1; UPDATE t SET v = 'c' WHERE id = 101")
        database.execute("CREATE TABLE new PARTITION OF t FOR VALUES FROM (200) TO (300)")
        database.execute("INSERT INTO t VALUES (201, 'd')")
        changes = _shown(read_rows(reader, 4))
        assert changes == [("d", 1), ("c", 102, "a"), ("u", 101, "c"), ("c", 201, "d")]


def test_what_happens_to_a_whole_partition_is_no_change_of_its_rows(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """The server sends nothing about it, as docs/sources.md says."""
    _partition(database)
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'a'), (101, 'b')")
        database.execute("TRUNCATE low; ALTER TABLE t DETACH PARTITION high")
        database.execute("UPDATE high SET v = 'c'")
        database.execute("ALTER TABLE t ATTACH PARTITION high FOR VALUES FROM (100) TO (200)")
        database.execute("UPDATE t SET v = 'd'")
        changes = _shown(read_rows(reader, 3))
        assert changes == [("c", 1, "a"), ("c", 101, "b"), ("u", 101, "d")]
    database.execute("DROP TABLE t; CREATE TABLE t (id int)")


def _read_until_stopped(
    source: PostgresChanges, position: Sequence[Split], count: int, reason: str
) -> tuple[list[dict[str, Any]], Sequence[Split], str]:
    """Read `count` rows, and then the error. Return the rows, the position, and the error."""
    assert source.discover(position) == position
    with contextlib.closing(source.reader(position, CONTEXT)) as reader:
        rows = read_rows(reader, count) if count else []
        with pytest.raises(BadRecord, match=reason) as stopped:
            read_to_error(reader)
        return rows, reader.snapshot(), str(stopped.value)


def test_a_job_that_is_behind_two_new_columns_reads_the_changes_of_each(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(server, first_copy="none")
    start = source.splits()
    database.execute("INSERT INTO t VALUES (1, 'a')")
    database.execute("ALTER TABLE t ADD w int; INSERT INTO t VALUES (2, 'b', 20)")
    database.execute("ALTER TABLE t ADD x int; INSERT INTO t VALUES (3, 'c', 30, 300)")
    # From here on each start does what the error before it says.
    rows, position, _ = _read_until_stopped(source, start, 1, "has a new column 'w'")
    assert rows == [{"id": 1, "v": "a", "_op": "c"}]
    again = source_of(server, first_copy="none")
    _, position, error = _read_until_stopped(again, position, 0, "has no column 'x'")
    assert "have the columns id, v, w. If the table has all of them" in error
    staged = source_of(
        server, first_copy="none", schema="id INT, v STRING, w INT", on_schema_change="stop"
    )
    rows, position, _ = _read_until_stopped(staged, position, 1, "has a new column 'x'")
    assert rows == [{"id": 2, "v": "b", "w": 20, "_op": "c"}]
    last = source_of(server, first_copy="none")
    with contextlib.closing(last.reader(position, CONTEXT)) as reader:
        assert read_rows(reader, 1) == [{"id": 3, "v": "c", "w": 30, "x": 300, "_op": "c"}]


def test_a_job_that_is_behind_a_dropped_column_reads_on_without_it(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("ALTER TABLE t ADD w int")
    start = source_of(server, first_copy="none").splits()
    database.execute("INSERT INTO t VALUES (1, 'a', 10); ALTER TABLE t DROP w")
    database.execute("INSERT INTO t VALUES (2, 'b')")
    present = source_of(server, first_copy="none")
    _, position, error = _read_until_stopped(present, start, 0, "has a new column 'w'")
    assert "has only some of them, and no others" in error
    named = source_of(
        server, first_copy="none", schema="id INT, v STRING", on_schema_change="ignore"
    )
    with contextlib.closing(named.reader(position, CONTEXT)) as reader:
        rows = read_rows(reader, 2)
    assert _shown(rows) == [("c", 1, "a"), ("c", 2, "b")]
    with contextlib.closing(source_of(server).reader(reader.snapshot(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (3, 'c')")
        assert _shown(read_rows(reader, 1)) == [("c", 3, "c")]


@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        ("DROP v, ADD w int", "has no column 'w'"),
        ("ALTER v TYPE int USING 7, ADD w int", "has column 'v' of another type"),
    ],
)
def test_a_job_that_is_behind_columns_that_no_options_read_copies_the_table_anew(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], alter: str, reason: str
) -> None:
    start = source_of(server, first_copy="none").splits()
    database.execute("INSERT INTO t VALUES (1, 'a')")
    database.execute(f"ALTER TABLE t {alter}; INSERT INTO t (id, w) VALUES (2, 20)".encode())
    present = source_of(server, first_copy="none")
    _, _, error = _read_until_stopped(present, start, 0, reason)
    remedy = "lacks some of them and has others, or if a column has another type: Drop the slot"
    assert remedy in error
    drop_slots(database)
    anew = source_of(server)
    with contextlib.closing(anew.reader(anew.splits(), CONTEXT)) as reader:
        assert [(row["id"], row["w"]) for row in read_rows(reader, 2)] == [(1, None), (2, 20)]


def test_columns_that_are_read_stay_and_new_ones_are_left_out_on_request(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    with pytest.raises(ConfigError, match="the next start would read them"):
        source_of(server, on_schema_change="ignore").splits()
    source = source_of(
        server, first_copy="none", schema="id INT, v STRING", on_schema_change="ignore"
    )
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("ALTER TABLE t ADD w int; INSERT INTO t VALUES (1, 'a', 10)")
        assert read_rows(reader, 1) == [{"id": 1, "v": "a", "_op": "c"}]
        database.execute("ALTER TABLE t DROP v; INSERT INTO t VALUES (2, 20)")
        with pytest.raises(BadRecord, match="has no column 'v'"):
            read_to_error(reader)


@pytest.mark.parametrize("first_copy", ["all", "only"])
def test_a_first_copy_without_a_column_that_must_stop_the_job_is_refused(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], first_copy: str
) -> None:
    database.execute("INSERT INTO t VALUES (1, 'a')")
    refusal = "would leave out v: add them to schema=, or give on_schema_change='ignore'"
    refused = source_of(server, first_copy=first_copy, schema="id INT", on_schema_change="stop")
    with pytest.raises(ConfigError, match=refusal):
        refused.splits()
    assert database.execute("SELECT FROM pg_replication_slots").fetchall() == []
    whole = source_of(
        server, first_copy=first_copy, schema="id INT, v STRING", on_schema_change="stop"
    )
    ignoring = source_of(server, first_copy=first_copy, schema="id INT", on_schema_change="ignore")
    start = whole.splits()
    for source, row in (whole, {"id": 1, "v": "a"}), (ignoring, {"id": 1}):
        with contextlib.closing(source.reader(start, CONTEXT)) as reader:
            assert read_rows(reader, 1) == [{**row, "_op": "r"}]
    # A start with other options, before a row was copied.
    with (
        contextlib.closing(refused.reader(start, CONTEXT)) as reader,
        pytest.raises(ConfigError, match=refusal),
    ):
        read_to_error(reader)


def test_a_partition_with_another_identity_ends_the_job_before_a_key_is_missing(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """The stream has the identity of the table, and the old rows that of the partition."""
    _partition(database)
    database.execute("CREATE UNIQUE INDEX by_v ON low (v); ALTER TABLE low ALTER v SET NOT NULL")
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'a')")
        read_rows(reader, 1)
        before = reader.snapshot()
        database.execute("ALTER TABLE low REPLICA IDENTITY USING INDEX by_v")
        database.execute("DELETE FROM t WHERE id = 1")
        with pytest.raises(BadRecord, match="a partition has another replica identity"):
            read_to_error(reader)
        assert reader.snapshot() == before


_REWRITES = [
    "ALTER TABLE t ALTER v TYPE text USING upper(v)",
    "ALTER TABLE t DROP v, ADD v text",
    "ALTER TABLE t ALTER n TYPE numeric(10, 2)",
]


@pytest.mark.parametrize("statement", _REWRITES)
@pytest.mark.parametrize("is_partitioned", [False, True], ids=["plain", "partitioned"])
def test_values_that_change_without_a_change_of_their_rows_end_the_job(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
    is_partitioned: bool,
) -> None:
    """The stream has no change of these rows, and the same types before and after."""
    monkeypatch.setattr(postgres_reader, "PUBLICATION_CHECK_S", 0.0)
    _create_rows(database, is_partitioned)
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("UPDATE t SET v = 'b'")
        assert len(read_rows(reader, 1)) == 1
        reader.commit(reader.snapshot())
        database.execute(statement.encode())
        with pytest.raises(BadRecord, match="Change the target alike, and start the job again"):
            read_to_error(reader)
        decided = reader.snapshot()
    again = source_of(server, first_copy="none")
    with contextlib.closing(again.reader(again.discover(decided), CONTEXT)) as reader:
        database.execute("INSERT INTO t (id, v) VALUES (2, 'new')")
        assert [row["id"] for row in read_rows(reader, 1)] == [2]


def _create_rows(database: psycopg.Connection[TupleRow], is_partitioned: bool) -> None:
    columns = "(id int PRIMARY KEY, v text, n numeric(10, 4))"
    database.execute("DROP TABLE t")
    if is_partitioned:
        database.execute(f"CREATE TABLE t {columns} PARTITION BY RANGE (id)".encode())
        database.execute("CREATE TABLE t_all PARTITION OF t DEFAULT")
    else:
        database.execute(f"CREATE TABLE t {columns}".encode())
    database.execute("INSERT INTO t VALUES (1, 'a', 1.2345)")


_ALL_ARE_IDLE = """
    SELECT bool_and(state = 'idle' AND clock_timestamp() - state_change > '0.3 s')
    FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


def test_values_that_change_during_the_copy_end_it(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """Rows of one part of the copy would have other values than those of another part."""
    database.execute("INSERT INTO t SELECT n, 'a' FROM generate_series(1, 30) AS n")
    source = source_of(server, chunk_rows=1, batch_rows=1, copy_parallelism=1)
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        read_rows(reader, 1)
        # The table is not locked while the copy waits for the reader to take rows.
        await_true(lambda: database.execute(_ALL_ARE_IDLE).fetchone() == (True,))
        database.execute("SET lock_timeout = '20s'; ALTER TABLE t DROP v, ADD v text")
        with pytest.raises(BadRecord, match=r"from before and after it\. Drop the slot"):
            read_to_error(reader)


def test_statements_that_change_no_value_end_no_job(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgres_reader, "PUBLICATION_CHECK_S", 0.0)
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        statements = (
            "ALTER TABLE t ALTER v SET DEFAULT 'x'",
            "VACUUM FULL t",
            "ALTER TABLE t ALTER v SET STATISTICS 10",
            "CLUSTER t USING t_pkey",
            "GRANT SELECT (v) ON t TO PUBLIC",
        )
        for at, statement in enumerate(statements):
            database.execute(statement.encode())
            database.execute("INSERT INTO t VALUES (%s, 'a')", [at])
            assert [row["id"] for row in read_rows(reader, 1)] == [at]
            reader.poll(0.0)
