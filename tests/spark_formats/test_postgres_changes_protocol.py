"""The reader of `onceflow-postgres-changes`, called as Spark calls it, and crashed at each step."""

from __future__ import annotations

import json
import os
import pickle
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyspark
import pytest
from psycopg.rows import TupleRow
from tests.integration.postgres_changes_kit import drop_slots
from tests.support.waiting import await_true

from onceflow.clients.postgres.replication import parse_lsn
from onceflow.connectors.spark.formats import PostgresChangesFormat
from onceflow.connectors.spark.options.postgres_changes import CHANGES_READ
from onceflow.connectors.spark.readers import postgres_changes
from onceflow.connectors.spark.readers.postgres_changes import ChangesStreamReader
from onceflow.core.errors import BadRecord, ConfigError, OffsetOutOfRange, StateIncompatible
from onceflow.integration.servers.postgres import EmbeddedPostgres

pytestmark = pytest.mark.integration

_STEPS = ("planned", "logged", "acknowledged", "read", "written", "committed")
_ROWS = 60
_MOVE_KEY = (
    "UPDATE t SET id = %(other)s WHERE id = %(key)s"
    " AND NOT EXISTS (SELECT FROM t WHERE id = %(other)s)"
)


class Crashed(Exception):
    """Raised at the step at which the driver of `Query` dies."""


class Query:
    """A query as Spark runs it: a log of ends, a log of commits, and a sink that is exactly once.

    Both logs and the sink survive a crash; the reader does not.
    """

    def __init__(self, url: str, directory: Path, **options: str) -> None:
        self.options = {
            "url": url,
            "table": "t",
            "slot": "s",
            "changesLocation": str(directory / "changes"),
            **options,
        }
        self.ends: list[str] = []
        self.commits: set[int] = set()
        self.written: dict[int, list[dict[str, Any]]] = {}
        self.dies_at = ""
        self.reader: ChangesStreamReader | None = None

    def start(self) -> ChangesStreamReader:
        """Return the reader of this driver, which is made if there is none."""
        if self.reader is None:
            source = PostgresChangesFormat(self.options)
            reader = source.streamReader(source.schema())
            assert isinstance(reader, ChangesStreamReader)
            self.reader = reader
        return self.reader

    def crash(self) -> None:
        if self.reader is not None:
            self.reader.stop()
        self.reader, self.dies_at = None, ""

    def run_batch(self, *, dies_at: str = "") -> bool:
        """Run the batch that was logged and not committed, or the next one; False without one."""
        self.dies_at = dies_at
        reader, number = self.start(), len(self.ends) - 1
        if number in self.commits or number < 0:
            start = self._end(number)
            end = json.dumps(reader.latestOffset(json.loads(start)))
            self._pass("planned")
            if end == start:
                return False
            self.ends.append(end)
            self._pass("logged")
            if number >= 0:
                reader.commit(json.loads(self.ends[number]))
            self._pass("acknowledged")
            number += 1
        start, end = self._end(number - 1), self.ends[number]
        rows: list[dict[str, Any]] = []
        for task in reader.partitions(json.loads(start), json.loads(end)):
            executor: ChangesStreamReader = pickle.loads(pickle.dumps(reader))
            for batch in executor.read(pickle.loads(pickle.dumps(task))):
                rows += batch.to_pylist()
        self._pass("read")
        self.written.setdefault(number, rows)
        assert self.written[number] == rows, "a repeated batch has other rows"
        self._pass("written")
        self.commits.add(number)
        self._pass("committed")
        return True

    def run_to_end(self) -> None:
        """Run batches as Trigger.AvailableNow does, in a driver of its own."""
        self.crash()
        self.start().prepareForTriggerAvailableNow()
        while self.run_batch():
            pass
        self.crash()

    @property
    def first_lsn(self) -> int:
        """The LSN at which a new slot is, which stands in the first end; 0 without one."""
        return parse_lsn(json.loads(self.ends[0])["position"]["lsn"]) if self.ends else 0

    def committed_lsn(self) -> int:
        """Return the LSN of the last batch that is in the log of commits; 0 without one."""
        if not self.commits:
            return 0
        return parse_lsn(json.loads(self.ends[max(self.commits)])["position"]["lsn"])

    def copy(self) -> dict[int, str]:
        """Return the table that the written rows make. Fails if a row came twice or not at all."""
        table: dict[int, str] = {}
        for number in sorted(self.written):
            for row in self.written[number]:
                key, operation = row["id"], row["_op"]
                if operation in "rc":
                    assert key not in table, f"doubled: {row}"
                if operation == "d":
                    del table[key]
                else:
                    table[key] = row["v"]
        return table

    def _end(self, number: int) -> str:
        if number >= 0:
            return self.ends[number]
        return json.dumps(self.start().initialOffset())

    def _pass(self, step: str) -> None:
        if step == self.dies_at:
            raise Crashed(step)


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


def _table(database: psycopg.Connection[TupleRow]) -> dict[int, str]:
    return dict(database.execute("SELECT id, v FROM t").fetchall())


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
    seed = int(os.environ.get("ONCEFLOW_TEST_SEED", random.randrange(2**32)))
    draw = random.Random(seed)
    # Small limits: the copy takes several batches, and large transactions are cut.
    query.options |= {"maxRowsPerTrigger": "15", "chunkRows": "10", "transactionRowsMax": "20"}
    steps = [*_STEPS, *_STEPS]
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
        assert _slot(database) <= reached, f"seed {seed}"
    query.run_to_end()
    assert query.copy() == _table(database), f"seed {seed}"
    # Spark does not repeat a commit that a crash has prevented: the commit of the next batch does.
    database.execute("INSERT INTO t VALUES (1000, 'last')")
    query.run_to_end()
    assert query.copy() == _table(database), f"seed {seed}"
    # Only the last batch waits for its commit.
    assert {int(file.name.partition("-")[0]) for file in _files(query)} <= {len(query.ends)}


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
    assert not query.run_batch()
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


@pytest.mark.servers
def test_a_batch_without_a_new_column_is_committed_as_its_error_advises(
    database: psycopg.Connection[TupleRow], query: Query
) -> None:
    with pytest.raises(Crashed):
        while True:
            query.run_batch(dies_at="logged")
    query.crash()
    database.execute("ALTER TABLE t ADD COLUMN w int")
    database.execute("INSERT INTO t VALUES (1000, 'after', 1)")
    with pytest.raises(
        ConfigError, match=r"'w' is not in this.*schema, which has the columns id, v "
    ):
        query.run_batch()
    query.options["schema"] = "id BIGINT, v STRING"
    query.run_to_end()
    del query.options["schema"]
    database.execute("INSERT INTO t VALUES (1001, 'after', 2)")
    query.run_to_end()
    assert query.copy() == _table(database)
    assert query.written[max(query.written)][-1]["w"] == 2


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
    database.execute("SELECT pg_replication_slot_advance('s', pg_current_wal_lsn())")
    with pytest.raises(OffsetOutOfRange, match=r"slot s is at .*, past .* another checkpointLoc"):
        query.run_batch()
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
    query: Query, tmp_path: Path
) -> None:
    query.run_to_end()
    query.run_batch()
    other = Query(query.options["url"], tmp_path / "other")
    killer = threading.Timer(0.5, query.crash)
    killer.start()
    other.run_to_end()
    killer.join()
    assert len(other.copy()) == _ROWS


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
    with pytest.raises(Crashed):
        while True:
            query.run_batch(dies_at="logged")
    (file,) = _files(query)
    hidden = file.rename(file.with_suffix(".hidden"))
    with pytest.raises(OffsetOutOfRange, match="changesLocation=.*does not exist.*restore it"):
        query.run_batch()
    hidden.rename(file)
    query.run_to_end()
    assert query.copy() == _table(database)


def test_ends_of_another_source_or_out_of_order_are_refused(query: Query) -> None:
    with pytest.raises(StateIncompatible, match="not those of onceflow-postgres-changes"):
        query.start().latestOffset({"payments": {"offsets": {}}})
    end: dict[str, Any] = {"batch": 5, "rows": 0, "file": "", "slot": "s", "position": {}}
    with pytest.raises(StateIncompatible, match="from 5 to 5 of slot s"):
        query.start().partitions(end, end)


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
