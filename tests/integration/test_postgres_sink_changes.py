"""What is of Postgres alone in changes by key and in ledger mode: roles, names, its settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from tests.integration.postgres_sink_kit import Job, ids_in, query
from tests.integration.sink_kit import rows

from onceflow import Checkpointing, LocalProcesses, NoRestart, Pipeline
from onceflow.core.errors import BadRow, ConfigError
from onceflow.core.protocol.committables import Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import SinkWriter
from onceflow.core.storage import FileStagingArea
from onceflow.integration.servers import EmbeddedPostgres
from onceflow.sinks import PostgresSink
from onceflow.sources import DatagenSource

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("op", pa.string())])
_UUID = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"


def _commit(job: Job, writer: SinkWriter, checkpoint: int) -> None:
    (committable,) = writer.pre_commit(CheckpointId(checkpoint))
    assert job.committer().commit(committable) == Committed()


@pytest.mark.parametrize("mode", ["two_phase", "ledger"])
def test_role_without_privileges_is_told_the_grant(
    postgres_database: str, tmp_path: Path, mode: Literal["two_phase", "ledger"]
) -> None:
    query(postgres_database, "CREATE TABLE t (id bigint PRIMARY KEY, name text)")
    sink = PostgresSink(
        postgres_database, table="t", write_mode="upsert", primary_key=("id",),
        operation_column="op", commit_mode=mode,
    )  # fmt: skip
    staging = FileStagingArea.in_directory(str(tmp_path), "job.ledger")
    with Job(sink, schema=SCHEMA, staging=staging) as job:
        job.check()
    query(
        postgres_database,
        "DO $$ BEGIN CREATE ROLE clerk LOGIN; EXCEPTION WHEN duplicate_object THEN END $$",
    )
    query(postgres_database, "GRANT ALL ON SCHEMA onceflow TO clerk")
    query(postgres_database, "GRANT ALL ON ALL TABLES IN SCHEMA onceflow TO clerk")
    sink = dataclasses.replace(sink, user="clerk")
    with Job(sink, schema=SCHEMA, staging=staging) as other:
        for attempt, grant in enumerate(("INSERT", "UPDATE, SELECT, DELETE"), 2):
            with pytest.raises(ConfigError, match=f"GRANT {grant} ON") as failure:
                other.check(attempt)
            assert str(failure.value).count("GRANT") == 1
            query(postgres_database, str(failure.value).rpartition("Run: ")[2])
        other.check(4)
    query(postgres_database, "REVOKE ALL ON t FROM clerk; REVOKE ALL ON SCHEMA onceflow FROM clerk")
    query(postgres_database, "REVOKE ALL ON ALL TABLES IN SCHEMA onceflow FROM clerk")


@pytest.mark.parametrize(
    ("kind", "forms", "expected"),
    [
        ("uuid", (_UUID, _UUID.upper()), "a key has one form, small letters with hyphens"),
        ("uuid", (_UUID, _UUID.replace("-", "")), "a key has one form, small letters with hyphens"),
        ("char(9)", ("a", "a "), "spaces at its end are not kept, or not told apart"),
        ("jsonb", ('{"a":1}', '{"a": 1}'), "compares JSON by its meaning"),
    ],
)
def test_one_key_in_two_forms_never_leaves_the_older_change(
    postgres_database: str, tmp_path: Path, kind: str, forms: tuple[str, str], expected: str
) -> None:
    """Different text goes to different subtasks: which change of the one row came last was chance.

    The control has all keys in the first form, but for JSON, of which equal text is no proof.
    """
    query(postgres_database, f"CREATE TABLE t (k {kind} PRIMARY KEY, v bigint)")

    def run(name: str, other: str) -> None:
        pipeline = Pipeline(
            LocalProcesses(),
            name=name,
            parallelism=2,
            checkpointing=Checkpointing(storage=str(tmp_path / name), interval=None),
            restart=NoRestart(),
        )
        records = pipeline.read(DatagenSource(rows=1_000), uid="records").map(
            lambda record: {"k": other if record["id"] % 2 else forms[0], "v": record["id"]},
            schema="k STRING, v BIGINT",
        )
        sink = PostgresSink(
            postgres_database, table="t", write_mode="upsert", primary_key=("k",),
            commit_mode="ledger",
        )  # fmt: skip
        records.write(sink, uid="out")
        pipeline.run(120)

    with pytest.raises((BadRow, ConfigError), match=expected):
        run("two-forms", forms[1])
    assert query(postgres_database, "SELECT v FROM t") == []
    if kind != "jsonb":
        run("one-form", forms[0])
        assert query(postgres_database, "SELECT v FROM t") == [(999,)]


@pytest.mark.parametrize(
    ("partition", "mend"),
    [
        ("CREATE UNLOGGED TABLE p0", "ALTER TABLE p0 SET LOGGED"),
        ("CREATE TABLE p0", None),
    ],
)
def test_partition_that_a_crash_of_the_server_empties_is_refused_with_what_mends_it(
    postgres_database: str, partition: str, mend: str | None
) -> None:
    """The parent says of itself that it is permanent; rows are in partitions, at any depth."""
    query(postgres_database, "CREATE TABLE t (id bigint, note text) PARTITION BY RANGE (id)")
    nested = "PARTITION OF t FOR VALUES FROM (0) TO (99) PARTITION BY RANGE (id)"
    query(postgres_database, f"CREATE TABLE between_them {nested}")
    below = "PARTITION OF between_them FOR VALUES FROM (0) TO (50)"
    query(postgres_database, f"{partition} {below}")
    schema = pa.schema([("id", pa.int64()), ("note", pa.string())])
    with Job(PostgresSink(postgres_database, table="t"), schema=schema) as job:
        if mend is not None:
            with pytest.raises(ConfigError, match="its partition p0 is unlogged") as failure:
                job.check()
            assert str(failure.value).endswith(f"Mend: {mend}")
            query(postgres_database, mend)
        job.check(2)


def test_names_keep_their_case_and_odd_characters(postgres_database: str) -> None:
    query(postgres_database, """CREATE TYPE "Mood %s {}" AS ENUM ('good', 'bad')""")
    query(
        postgres_database,
        'CREATE TABLE "Odd ""name"" %s {0}" ("Key %(a)s" bigint PRIMARY KEY, "{v}" "Mood %s {}")',
    )
    schema = pa.schema([("Key %(a)s", pa.int64()), ("{v}", pa.string())])
    sink = PostgresSink(
        postgres_database, table='Odd "name" %s {0}', write_mode="upsert",
        primary_key=("Key %(a)s",), tombstones=True, commit_mode="two_phase",
    )  # fmt: skip
    with Job(sink, schema=schema) as job:
        writer = job.check().writer()
        given: list[list[str | None]] = [["good", "good"], ["bad", None]]
        for checkpoint, values in enumerate(given, 1):
            columns = [pa.array([1, 2]), pa.array(values, pa.string())]
            writer.write(pa.record_batch(columns, schema=schema))
            _commit(job, writer, checkpoint)
    found = query(postgres_database, 'SELECT * FROM "Odd ""name"" %s {0}"')
    assert found == [(1, "bad")]


def test_column_privileges_are_enough(postgres_database: str) -> None:
    query(postgres_database, "CREATE TABLE t (id bigint PRIMARY KEY, name text, secret text)")
    query(
        postgres_database,
        "CREATE ROLE part LOGIN; GRANT INSERT (id, name), UPDATE (name), SELECT (id, name) ON t "
        "TO part; CREATE SCHEMA bookkeeping AUTHORIZATION part",
    )
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    sink = PostgresSink(
        postgres_database, user="part", table="t", write_mode="upsert", primary_key=("id",),
        ledger_schema="bookkeeping", commit_mode="two_phase",
    )  # fmt: skip
    try:
        with Job(sink, schema=schema) as job:
            writer = job.check().writer()
            for checkpoint in (1, 2):
                batch = pa.record_batch([pa.array([1]), pa.array([f"{checkpoint}"])], schema=schema)
                writer.write(batch)
                _commit(job, writer, checkpoint)
        assert query(postgres_database, "SELECT * FROM t") == [(1, "2", None)]
    finally:
        query(postgres_database, "DROP OWNED BY part CASCADE; DROP ROLE part")


def test_works_on_a_server_that_prepares_nothing(tmp_path: Path) -> None:
    staging = FileStagingArea.in_directory(str(tmp_path), "job.ledger")
    with EmbeddedPostgres({"max_prepared_transactions": "0"}) as server:
        sink = PostgresSink(server.url, table="ledger", create=True, commit_mode="ledger")
        with Job(sink, staging=staging) as job:
            job.check()
            assert job.committer().commit(job.prepare(1, [1, 2])) == Committed()
        assert ids_in(server.url) == [1, 2]


@pytest.mark.parametrize(
    "settings", [{"commit_mode": "ledger"}, {"delivery": "at_least_once"}], ids=str
)
def test_commit_is_durable_where_the_role_does_not_wait_for_the_disk(
    postgres_database: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """The staged rows are deleted after it: what the server forgets then is gone."""
    query(postgres_database, "CREATE TABLE seen (value text)")
    query(
        postgres_database,
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO seen "
        "VALUES (current_setting('synchronous_commit')); RETURN NEW; END $$",
    )
    url = f"{postgres_database}?options=-c%20synchronous_commit%3Doff"
    sink = PostgresSink(url, table="ledger", create=True, **settings)
    staging = FileStagingArea.in_directory(str(tmp_path), "job.ledger")
    with Job(sink, staging=staging) as job:
        job.check()
        query(
            postgres_database,
            "CREATE TRIGGER note BEFORE INSERT ON ledger FOR EACH ROW EXECUTE FUNCTION note()",
        )
        writer = job.writer()
        writer.write(rows([1]))
        for committable in writer.pre_commit(CheckpointId(1)):
            assert job.committer().commit(committable) == Committed()
    assert query(postgres_database, "SELECT value FROM seen") == [("on",)]


def test_a_null_in_an_array_stays_a_null_whatever_the_database_sets(postgres_database: str) -> None:
    query(
        postgres_database,
        "CREATE TABLE t (id bigint PRIMARY KEY, v text[])",
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET array_nulls = off', current_database());"
        " END $$",
    )
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.list_(pa.string()))])
    sink = PostgresSink(
        postgres_database, table="t", write_mode="upsert", primary_key=("id",),
        commit_mode="two_phase",
    )  # fmt: skip
    with Job(sink, schema=schema) as job:
        writer = job.check().writer()
        writer.write(pa.RecordBatch.from_pylist([{"id": 1, "v": ["a", None]}], schema=schema))
        _commit(job, writer, 1)
    assert query(postgres_database, "SELECT v FROM t") == [(["a", None],)]
