"""The reader of `onceflow-postgres-changes`, called as Spark calls it, and crashed at each step."""

from __future__ import annotations

import json
import pickle
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pyspark
import pytest
from psycopg.rows import TupleRow
from tests.integration.postgres_changes_kit import drop_slots
from tests.spark_formats.changes_query import STEPS, Crashed, Query
from tests.support.drawn_seeds import draw_random
from tests.support.waiting import await_true

from onceflow.clients.postgres.replication import parse_lsn
from onceflow.connectors.spark.formats import PostgresChangesFormat
from onceflow.connectors.spark.options.postgres_changes import CHANGES_READ
from onceflow.connectors.spark.readers import postgres_changes
from onceflow.core.errors import BadRecord, ConfigError, OffsetOutOfRange, StateIncompatible
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sources.postgres.slot import wait_until_free

pytestmark = pytest.mark.integration

_ROWS = 60
_MOVE_KEY = (
    "UPDATE t SET id = %(other)s WHERE id = %(key)s"
    " AND NOT EXISTS (SELECT FROM t WHERE id = %(other)s)"
)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres({"wal_level": "logical"}) as running:
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS t")
        connection.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
        connection.execute(
            "INSERT INTO t SELECT g, 'copied' FROM generate_series(1, %s) AS g", [_ROWS]
        )
        yield connection
        drop_slots(connection)


@pytest.fixture
def query(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], tmp_path: Path
) -> Iterator[Query]:
    del database
    query = Query(server.url, tmp_path)
    yield query
    query.crash()


def _table(database: psycopg.Connection[TupleRow], column: str = "v") -> dict[int, Any]:
    return dict(database.execute(f"SELECT id, {column} FROM t".encode()).fetchall())


def _slot(database: psycopg.Connection[TupleRow]) -> int:
    ((lsn,),) = database.execute(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = 's'"
    ).fetchall()
    return parse_lsn(lsn)


def _files(query: Query) -> list[Path]:
    return sorted(Path(query.options["changesLocation"]).rglob("*.arrow"))


def _change(database: psycopg.Connection[TupleRow], draw: random.Random) -> None:
    """Change some rows in one transaction."""
    with database.transaction():
        for _ in range(draw.choice([1, 3, 40])):
            key, other = draw.randrange(2 * _ROWS), draw.randrange(2 * _ROWS)
            database.execute(
                draw.choice(
                    [
                        "INSERT INTO t VALUES (%(key)s, %(value)s) ON CONFLICT DO NOTHING",
                        "UPDATE t SET v = %(value)s WHERE id = %(key)s",
                        "DELETE FROM t WHERE id = %(key)s",
                        _MOVE_KEY,
                    ]
                ),
                {"key": key, "other": other, "value": str(draw.random())},
            )


def test_a_crash_at_any_step_loses_and_doubles_nothing(
    database: psycopg.Connection[TupleRow], query: Query
) -> None:
    draw = draw_random()
    # Small limits: the copy takes several batches, and large transactions are cut.
    query.options |= {"maxRowsPerTrigger": "15", "chunkRows": "10", "transactionRowsMax": "20"}
    steps = [*STEPS, *STEPS]
    draw.shuffle(steps)
    created = 0
    for step in steps:
        with pytest.raises(Crashed):
            while True:
                _change(database, draw)
                query.run_batch(dies_at=step)
        query.crash()
        # Before the first end is logged, the slot is where it was created.
        created = created or _slot(database)
        reached = max(query.committed_lsn(), query.first_lsn, created)
        assert _slot(database) <= reached
    query.run_to_end()
    assert query.copy() == _table(database)
    # Spark does not repeat a commit that a crash has prevented: the commit of the next batch does.
    database.execute("INSERT INTO t VALUES (1000, 'last')")
    query.run_to_end()
    assert query.copy() == _table(database)
    # Only the last batch waits for its commit.
    last = json.loads(query.ends[-1])["batch"]
    assert {int(file.name.partition("-")[0]) for file in _files(query)} <= {last}


def test_available_now_ends_with_the_changes_that_were_there_at_its_start(
    database: psycopg.Connection[TupleRow], query: Query
) -> None:
    # The last batch of the copy is full, so the copy ends without rows.
    query.options |= {"chunkRows": str(_ROWS), "maxRowsPerTrigger": "20"}
    query.run_to_end()
    assert query.copy() == _table(database)
    # The copy is over, so a new row is a change, even behind the last key.
    database.execute("INSERT INTO t VALUES (1000, 'new')")
    query.run_to_end()
    assert query.written[max(query.written)] == [{"id": 1000, "v": "new", "_op": "c"}]
    database.execute("UPDATE t SET v = 'before' WHERE id <= 5")
    query.start().prepareForTriggerAvailableNow()
    query.run_batch()
    database.execute("UPDATE t SET v = 'after' WHERE id <= 5")
    while query.run_batch():
        pass
    assert list(query.copy().values()).count("before") == 5
    query.run_to_end()
    assert query.copy() == _table(database)


def test_an_idle_query_lets_the_slot_move_by_a_batch_without_rows(
    database: psycopg.Connection[TupleRow], query: Query
) -> None:
    query.options |= {"statusInterval": "0.2 s", "firstCopy": "none"}
    query.run_batch()
    database.execute("INSERT INTO t VALUES (1000, 'x')")
    await_true(lambda: query.run_batch() and bool(query.copy()))
    last = query.committed_lsn()
    await_true(query.run_batch)
    # The reader sends the position on a thread of its own.
    await_true(lambda: _slot(database) >= last)
    assert _slot(database) == last
    assert not _files(query)
    # The batch without rows needs no other one.
    time.sleep(0.3)
    assert not query.run_batch()


@pytest.mark.parametrize("available_now", [False, True])
def test_a_table_that_is_idle_in_a_busy_server_keeps_no_wal(
    database: psycopg.Connection[TupleRow],
    query: Query,
    monkeypatch: pytest.MonkeyPatch,
    available_now: bool,
) -> None:
    monkeypatch.setattr(postgres_changes, "_WAL_MOVED_MIN", 10_000)
    query.options |= {"statusInterval": "0.2 s", "firstCopy": "none"}
    query.run_to_end()
    ((lsn,),) = database.execute("SELECT pg_current_wal_lsn()::text").fetchall()
    for _ in range(2):
        database.execute("SELECT pg_logical_emit_message(true, 'busy', repeat('x', 20000))")
        if available_now:
            query.run_to_end()
        else:
            await_true(query.run_batch)
    assert query.copy() == {}
    # The slot is at the batch before the last one.
    assert query.committed_lsn() > parse_lsn(lsn)
    before = json.loads(query.ends[-2])["position"]["lsn"]
    await_true(lambda: _slot(database) >= parse_lsn(before))


def _die_with_staged_rows(query: Query) -> None:
    """Let the driver die after it has logged a batch with rows.

    The batches before have none if the server begins late.
    """
    while not _files(query):
        with pytest.raises(Crashed):
            while True:
                query.run_batch(dies_at="logged")


def _run_as_advised(query: Query, error: BaseException) -> None:
    """Start the query once with the options that `error` gives, and then with its own."""
    given = query.options
    query.options = {**given, **dict(re.findall(r'(\w+)="([^"]*)"', str(error)))}
    for name in re.findall(r"without option (\w+)", str(error)):
        query.options.pop(name, None)
    with suppress(BadRecord):
        query.run_to_end()
    query.options = given
    query.run_to_end()


@pytest.mark.servers
def test_a_batch_without_a_new_column_is_committed_as_its_error_advises(
    database: psycopg.Connection[TupleRow], query: Query
) -> None:
    _die_with_staged_rows(query)
    query.crash()
    database.execute("INSERT INTO t VALUES (1000, 'before')")
    database.execute("ALTER TABLE t ADD COLUMN w int")
    database.execute("INSERT INTO t VALUES (1001, 'after', 1)")
    with pytest.raises(ConfigError, match="column 'w' is not in this micro-batch") as refused:
        query.run_batch()
    _run_as_advised(query, refused.value)
    database.execute("INSERT INTO t VALUES (1002, 'after', 2)")
    query.run_to_end()
    assert query.copy() == _table(database)
    assert query.copy("w") == _table(database, "w")


@pytest.mark.servers
def test_a_batch_without_new_metadata_is_committed_as_its_error_advises(
    database: psycopg.Connection[TupleRow], query: Query
) -> None:
    _die_with_staged_rows(query)
    query.options["metadata"] = "_xid"
    query.crash()
    with pytest.raises(ConfigError, match="column '_xid' is not in this micro-batch") as refused:
        query.run_batch()
    _run_as_advised(query, refused.value)
    database.execute("INSERT INTO t VALUES (1000, 'after')")
    query.run_to_end()
    assert query.copy() == _table(database)
    assert query.copy("_xid")[1000] is not None


@pytest.mark.parametrize(
    "change",
    ["ADD COLUMN w int DEFAULT 7", pytest.param("DROP COLUMN v", marks=pytest.mark.servers)],
)
def test_a_dataframe_from_before_a_changed_column_is_refused(
    database: psycopg.Connection[TupleRow], query: Query, change: str
) -> None:
    query.run_to_end()
    query.frame = PostgresChangesFormat(query.options).schema()
    database.execute(f"ALTER TABLE t {change}".encode())
    database.execute("INSERT INTO t (id) VALUES (1000)")
    name = change.split()[2]
    with pytest.raises(ConfigError, match=f"column {name!r}.* by load.. again"):
        query.run_to_end()
    query.frame = None
    query.run_to_end()
    assert query.written[max(query.written)] == [
        {"id": 1000, "v": None, "w": 7, "_op": "c"} if name == "w" else {"id": 1000, "_op": "c"}
    ]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("available_now", [False, pytest.param(True, marks=pytest.mark.servers)])
def test_a_changed_column_ends_a_query_whose_table_was_idle(
    database: psycopg.Connection[TupleRow], query: Query, available_now: bool
) -> None:
    query.options["firstCopy"] = "none"
    query.run_batch()
    database.execute("SELECT pg_logical_emit_message(true, 'other', 'x')")
    database.execute("ALTER TABLE t ADD COLUMN w int; INSERT INTO t VALUES (1000, 'after', 1)")
    if available_now:
        query.start().prepareForTriggerAvailableNow()
    with pytest.raises(BadRecord, match="new column 'w'"):
        while True:
            query.run_batch()
    query.run_to_end()
    assert query.copy("w") == {1000: 1}


@pytest.mark.servers
@pytest.mark.timeout(60)
def test_available_now_ends_before_a_column_that_was_changed_after_its_start(
    database: psycopg.Connection[TupleRow], query: Query
) -> None:
    query.options["firstCopy"] = "none"
    query.run_batch()
    database.execute("SELECT pg_logical_emit_message(true, 'other', 'before')")
    query.start().prepareForTriggerAvailableNow()
    database.execute("SELECT pg_logical_emit_message(true, 'other', 'after')")
    database.execute("ALTER TABLE t ADD COLUMN w int; INSERT INTO t VALUES (1000, 'after', 1)")
    # One poll reaches the end of the run, and finds the changed columns behind it.
    while query.run_batch():
        pass
    assert query.copy() == {}
    query.run_to_end()
    assert query.copy("w") == {1000: 1}


@pytest.mark.parametrize("available_now", [False, pytest.param(True, marks=pytest.mark.servers)])
def test_a_column_that_is_added_in_a_run_ends_it_when_all_before_is_committed(
    database: psycopg.Connection[TupleRow], query: Query, available_now: bool
) -> None:
    query.options |= {"statusInterval": "0.2 s", "firstCopy": "none"}
    query.run_batch()
    database.execute("INSERT INTO t VALUES (1000, 'before')")
    database.execute("ALTER TABLE t ADD COLUMN w int")
    database.execute("INSERT INTO t VALUES (1001, 'after', 1)")
    if available_now:
        query.start().prepareForTriggerAvailableNow()
    with pytest.raises(BadRecord, match=r"new column 'w'.*start the query again") as ended:
        while True:
            query.run_batch()
    assert "job" not in str(ended.value)
    query.crash()
    query.run_to_end()
    assert query.copy() == {1000: "before", 1001: "after"}


def test_a_slot_that_is_lost_or_ahead_is_refused_by_name(
    database: psycopg.Connection[TupleRow], query: Query
) -> None:
    query.run_to_end()
    database.execute("UPDATE t SET v = 'x'")
    query.run_to_end()
    database.execute("INSERT INTO t VALUES (1000, 'x')")
    _await_free_slot(database)
    database.execute("SELECT pg_replication_slot_advance('s', pg_current_wal_lsn())")
    with pytest.raises(OffsetOutOfRange, match=r"slot s is at .*, past .* another checkpointLoc"):
        query.run_batch()
    _await_free_slot(database)
    database.execute("SELECT pg_drop_replication_slot('s')")
    with pytest.raises(OffsetOutOfRange, match="slot s does not exist any more"):
        query.run_batch()


@pytest.mark.servers
def test_a_slot_of_another_purpose_or_reader_is_refused_by_name(
    database: psycopg.Connection[TupleRow], query: Query, tmp_path: Path
) -> None:
    database.execute("SELECT pg_create_physical_replication_slot('s')")
    with pytest.raises(ConfigError, match="slot s exists and is not one that this source reads"):
        query.run_batch()
    database.execute("SELECT pg_drop_replication_slot('s')")
    query.run_to_end()
    query.run_batch()
    other = Query(query.options["url"], tmp_path, connectTimeout="1 s")
    with pytest.raises(ConfigError, match="slot s is in use by another reader"):
        other.run_batch()


def test_a_new_query_waits_for_a_slot_whose_reader_was_just_killed(
    database: psycopg.Connection[TupleRow],
    query: Query,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query.run_to_end()
    query.run_batch()
    other = Query(query.options["url"], tmp_path / "other")
    killer = threading.Timer(0.5, query.crash)

    def kill_during_wait(*arguments: Any) -> None:
        is_active = "SELECT active FROM pg_replication_slots WHERE slot_name = 's'"
        assert database.execute(is_active).fetchall() == [(True,)]
        killer.start()
        wait_until_free(*arguments)
        assert database.execute(is_active).fetchall() == [(False,)]

    monkeypatch.setattr(postgres_changes, "wait_until_free", kill_during_wait)
    other.run_to_end()
    killer.join()
    assert len(other.copy()) == _ROWS


def test_a_new_query_waits_for_a_slot_that_a_killed_one_is_creating(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    query: Query,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database.execute("CREATE PUBLICATION s FOR TABLE t")
    created = "SELECT confirmed_flush_lsn IS NOT NULL FROM pg_replication_slots"
    with psycopg.connect(server.url) as writing, psycopg.connect(server.url) as creating:
        writing.execute("INSERT INTO t VALUES (1000, 'running')")
        create = "SELECT pg_create_logical_replication_slot('s', 'pgoutput')"
        creator = threading.Thread(target=creating.execute, args=(create,))
        creator.start()
        await_true(lambda: database.execute(created).fetchall() == [(False,)])
        ending = threading.Timer(0.5, writing.commit)

        def end_during_wait(*arguments: Any) -> None:
            ending.start()
            wait_until_free(*arguments)
            assert database.execute(created).fetchall() == [(True,)]

        monkeypatch.setattr(postgres_changes, "wait_until_free", end_during_wait)
        query.run_to_end()
        creator.join()
        ending.join()
    assert query.copy() == _table(database)


def test_an_end_that_spark_has_not_used_is_planned_again_from_its_start(
    database: psycopg.Connection[TupleRow], query: Query
) -> None:
    query.run_to_end()
    with pytest.raises(Crashed):
        while True:
            database.execute("UPDATE t SET v = v || '.' WHERE id = 1")
            query.run_batch(dies_at="planned")
    # The same reader goes on: it was not killed.
    assert query.reader is not None
    query.reader.prepareForTriggerAvailableNow()
    while query.run_batch():
        pass
    assert query.copy() == _table(database)


def test_a_staged_file_that_is_gone_is_refused_by_name(
    database: psycopg.Connection[TupleRow], query: Query
) -> None:
    _die_with_staged_rows(query)
    (file,) = _files(query)
    hidden = file.rename(file.with_suffix(".hidden"))
    with pytest.raises(OffsetOutOfRange, match="changesLocation=.*does not exist.*restore it"):
        query.run_batch()
    hidden.rename(file)
    query.run_to_end()
    assert query.copy() == _table(database)


@pytest.mark.servers
@pytest.mark.parametrize("lost", ["file", "checkpoint", "slot"])
def test_a_loss_is_repaired_as_its_error_advises(
    database: psycopg.Connection[TupleRow], query: Query, tmp_path: Path, lost: str
) -> None:
    query.options["firstCopy"] = "none"
    while not _files(query):
        with pytest.raises(Crashed):
            while True:
                query.run_batch(dies_at="logged" if query.ends else "")
                database.execute("UPDATE t SET v = 'lost' WHERE id = 1; DELETE FROM t WHERE id = 2")
    if lost == "file":
        _files(query)[-1].unlink()
    elif lost == "slot":
        query.run_to_end()
        _await_free_slot(database)
        database.execute("SELECT pg_drop_replication_slot('s')")
        database.execute("INSERT INTO t VALUES (999, 'in between')")
    else:
        query.ends[-1] = query.ends[-1].replace('"batch": ', '"batch": 1')
    with pytest.raises((OffsetOutOfRange, StateIncompatible)) as refused:
        query.run_batch()
    advice = "and start the query with another checkpointLocation"
    assert "empty the target" in str(refused.value)
    assert "table anew" in str(refused.value)
    query.crash()
    if "drop the slot" in str(refused.value):
        _await_free_slot(database)
        database.execute("SELECT pg_drop_replication_slot('s')")
    given = re.findall(rf"{advice} and (?:with )?(firstCopy)=(\w+)", str(refused.value))
    anew = Query(query.options["url"], tmp_path, **{"firstCopy": "none", **dict(given)})
    anew.run_to_end()
    database.execute("INSERT INTO t VALUES (1000, 'after')")
    anew.run_to_end()
    assert anew.copy() == _table(database)


def _await_free_slot(database: psycopg.Connection[TupleRow]) -> None:
    """Wait until the server has seen that the slot's last reader is gone."""
    active = "SELECT FROM pg_replication_slots WHERE active"
    await_true(lambda: not database.execute(active).fetchall())


def test_ends_of_another_source_or_out_of_order_are_refused(query: Query) -> None:
    with pytest.raises(StateIncompatible, match="not those of onceflow-postgres-changes"):
        query.start().latestOffset({"payments": {"offsets": {}}})
    end: dict[str, Any] = {"batch": 5, "rows": 0, "file": "", "slot": "s", "position": {}}
    with pytest.raises(StateIncompatible, match="from 5 to 7 of slot s"):
        query.start().partitions(end, {**end, "batch": 7})


def test_an_executor_gets_neither_the_address_of_the_database_nor_its_password(
    query: Query,
) -> None:
    query.options["password"] = "a-secret"
    pickled = pickle.dumps(query.start())
    assert b"a-secret" not in pickled
    assert b"postgresql" not in pickled


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (
            {"tables": "a,b"},
            "'tables' is not taken by readStream: a stream of Spark has one schema",
        ),
        ({"firstCopy": "only"}, 'firstCopy=only has no changes to follow: .*"onceflow-postgres"'),
        ({"slot": ""}, "slot= is empty"),
        ({"table": ""}, "table= is empty"),
        ({"changesLocation": "nowhere://x"}, "nowhere"),
        ({"batchRows": "5"}, "maxRowsPerTrigger limits a micro-batch"),
    ],
)
def test_options_that_a_stream_does_not_have_are_refused_by_name(
    options: dict[str, str], refusal: str
) -> None:
    given = {"url": "postgresql://host/db", "table": "t", "slot": "s", "changesLocation": "/c"}
    with pytest.raises(ConfigError, match=refusal):
        _ = CHANGES_READ.make({**given, **options}).location


def test_a_spark_that_tells_no_start_of_a_batch_is_refused_by_name(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.1.3")
    with pytest.raises(
        ConfigError, match=r"onceflow-postgres-changes needs .* since 4\.2; .* 4\.1\.3"
    ):
        query.start()
