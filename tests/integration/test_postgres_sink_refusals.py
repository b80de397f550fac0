"""Tests that repeated refusals of Postgres end at the start, in a bad row, or in a named error."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import psycopg
import pyarrow as pa
import pytest
from tests.integration.postgres_sink_kit import Job, ids_in, query

from onceflow import Checkpointing, ExponentialDelay, LocalProcesses, Pipeline
from onceflow.core import errors
from onceflow.core.protocol.committables import Committed, RetryLater
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import PostgresSink
from onceflow.sources import DatagenSource

Mode = Literal["two_phase", "ledger"]
SCHEMA = pa.schema([("id", pa.int64()), ("amount", pa.int64())])
_ROWS = pa.record_batch([pa.array([1, 2]), pa.array([10, 20])], schema=SCHEMA)


def sink_of(database: str, **settings: Any) -> PostgresSink:
    return PostgresSink(database, table="t", **settings)


@pytest.fixture
def staging(tmp_path: Path) -> FileStagingArea:
    return FileStagingArea.in_directory(str(tmp_path), "job.ledger")


@pytest.fixture
def limited_database(postgres_database: str) -> str:
    """A database that ends sessions after half a second, in a transaction or outside of one."""
    name = postgres_database.rpartition("/")[2].partition("?")[0]
    for setting in ("transaction_timeout", "idle_in_transaction_session_timeout"):
        query(postgres_database, f"ALTER DATABASE {name} SET {setting} = '500ms'")
    query(postgres_database, f"ALTER DATABASE {name} SET idle_session_timeout = '500ms'")
    query(postgres_database, f"ALTER DATABASE {name} SET statement_timeout = '500ms'")
    return postgres_database


@pytest.fixture
def policed_database(postgres_database: str) -> Generator[str, None, None]:
    """A database as a user reaches it who sees no row of table `t` with the id 1."""
    user = f"u{postgres_database.rpartition('/')[2].partition('?')[0][-12:]}"
    query(
        postgres_database,
        f"CREATE ROLE {user} LOGIN",
        "CREATE TABLE t (id bigint PRIMARY KEY, amount bigint)",
        "INSERT INTO t VALUES (1, 1)",
        f"GRANT ALL ON t TO {user}",
        f"DO $$ BEGIN EXECUTE format('GRANT ALL ON DATABASE %I TO {user}', current_database());"
        " END $$",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY p ON t USING (id <> 1)",
    )
    yield postgres_database.replace("postgres@", f"{user}@")
    query(postgres_database, f"DROP OWNED BY {user} CASCADE", f"DROP ROLE {user}")


def test_a_transaction_outlives_the_limits_of_the_server(limited_database: str) -> None:
    query(limited_database, "CREATE TABLE t (id bigint PRIMARY KEY, amount bigint)")
    with Job(sink_of(limited_database, commit_mode="two_phase"), schema=SCHEMA) as job:
        job.check()
        writer = job.writer()
        time.sleep(1.0)  # the session is idle for longer than it may be
        writer.write(_ROWS)
        time.sleep(1.5)  # and its transaction is open for longer than it may be
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert job.committer().commit(committable) == Committed()
    assert ids_in(limited_database, "t") == [1, 2]


@pytest.mark.parametrize("create", [False, True])
def test_rows_do_not_go_into_a_table_whose_name_is_the_given_one_cut_short(
    postgres_database: str, create: bool
) -> None:
    cut = "t" * 63
    query(postgres_database, f"CREATE TABLE {cut} (id bigint, amount bigint)")
    sink = PostgresSink(postgres_database, table=f"{cut}_other", create=create)
    with (
        Job(sink, schema=SCHEMA) as job,
        pytest.raises(
            errors.ConfigError, match="'t+_other' has 69 bytes, and Postgres cuts names to 63"
        ),
    ):
        job.check()
    names = pa.schema([*SCHEMA, pa.field("target", pa.string())])
    sink = sink_of(postgres_database, table_column="target", create=True)
    with Job(sink, schema=names) as job:
        rows = pa.record_batch([[1], [10], [f"{cut}_other"]], schema=names)
        with pytest.raises(errors.ConfigError, match="'t+_other' has 69 bytes"):
            job.check(2).prepare(1, rows, attempt=2)
    assert ids_in(postgres_database, cut) == []


@pytest.mark.parametrize("exists", [False, True])
def test_a_column_whose_name_postgres_cuts_short_is_not_created(
    postgres_database: str, exists: bool
) -> None:
    if exists:
        query(postgres_database, "CREATE TABLE t (id bigint)")
    schema = pa.schema([("id", pa.int64()), ("ü" * 32, pa.int64())])
    with (
        Job(sink_of(postgres_database, create=True, evolve=True), schema=schema) as job,
        pytest.raises(errors.ConfigError, match="'ü+' has 64 bytes, and Postgres cuts names to 63"),
    ):
        job.check()
    columns = "SELECT column_name FROM information_schema.columns WHERE table_name = 't'"
    assert query(postgres_database, columns) == [("id",)] * exists


@pytest.mark.parametrize("mode", ["two_phase", "ledger"])
@pytest.mark.parametrize("write_mode", ["upsert", "update"])
def test_changes_that_would_assign_an_identity_column_are_refused_at_the_start(
    postgres_database: str, staging: FileStagingArea, mode: Mode, write_mode: str
) -> None:
    query(
        postgres_database,
        "CREATE TABLE t (id bigint PRIMARY KEY, amount bigint GENERATED ALWAYS AS IDENTITY)",
    )
    sink = sink_of(postgres_database, write_mode=write_mode, primary_key=("id",), commit_mode=mode)
    with Job(sink, schema=SCHEMA, staging=staging) as job:
        with pytest.raises(
            errors.ConfigError, match="'amount' is GENERATED ALWAYS AS IDENTITY"
        ) as told:
            job.check()
        # The advice, followed.
        assert 'ALTER COLUMN "amount" SET GENERATED BY DEFAULT' in str(told.value)
        query(postgres_database, "ALTER TABLE t ALTER COLUMN amount SET GENERATED BY DEFAULT")
        job.check(2)


def test_inserts_and_keys_may_bring_the_value_of_an_identity_column(
    postgres_database: str, staging: FileStagingArea
) -> None:
    create = "CREATE TABLE t (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, amount bigint)"
    query(postgres_database, create)
    sink = sink_of(postgres_database, write_mode="upsert", primary_key=("id",))
    with Job(sink, schema=SCHEMA, staging=staging) as job:
        job.check()
        for checkpoint in (1, 2):
            committable = job.prepare(checkpoint, _ROWS)
            assert job.committer().commit(committable) == Committed()
    assert ids_in(postgres_database, "t") == [1, 2]


_NOTIFIES = """
    CREATE TABLE t (id bigint PRIMARY KEY, name text);
    CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN NOTIFY changes; RETURN NEW; END $$;
    CREATE TRIGGER told AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION tell();
"""
_RAISES = """
    CREATE TABLE t (id bigint PRIMARY KEY, name text);
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'not this one' USING ERRCODE = 'MY001'; END $$;
    CREATE TRIGGER refused BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION refuse();
"""
_DEFERRED = """
    CREATE TABLE others (id bigint PRIMARY KEY);
    CREATE TABLE t (
        id bigint PRIMARY KEY REFERENCES others DEFERRABLE INITIALLY DEFERRED, name text
    );
"""


@pytest.mark.parametrize(
    ("tables", "error", "expected"),
    [
        (_NOTIFIES, errors.TargetRefused, "cannot PREPARE a transaction that has executed"),
        (_RAISES, errors.BadRow, "not this one"),
        (_DEFERRED, errors.BadRow, "violates foreign key constraint"),
    ],
    ids=["notify", "own-code", "deferred"],
)
def test_what_a_trigger_or_a_deferred_constraint_refuses_ends_the_job_by_name(
    postgres_database: str, tmp_path: Path, tables: str, error: type[Exception], expected: str
) -> None:
    query(postgres_database, tables)
    pipeline = Pipeline(
        LocalProcesses(),
        name="refused",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(tmp_path), interval=None),
        restart=ExponentialDelay(initial_delay_s=0.01, max_delay_s=0.01),
    )
    records = pipeline.read(DatagenSource(rows=10), uid="records")
    records = records.map(
        lambda record: {"id": record["id"], "name": "n"},
        schema=pa.schema([("id", pa.int64()), ("name", pa.string())]),
    )
    records.write(sink_of(postgres_database, commit_mode="two_phase"), uid="ledger")
    with pytest.raises(error, match=expected):
        pipeline.run(60)
    assert ids_in(postgres_database, "t") == []


def test_a_decided_commit_whose_column_is_gone_waits_for_a_person(
    postgres_database: str, staging: FileStagingArea
) -> None:
    query(postgres_database, "CREATE TABLE t (id bigint PRIMARY KEY, amount bigint)")
    sink = sink_of(postgres_database, commit_mode="ledger")
    with Job(sink, schema=SCHEMA, staging=staging) as job:
        job.check()
        committable = job.prepare(1, _ROWS)
        committer = job.committer()
        query(postgres_database, "ALTER TABLE t RENAME TO elsewhere")
        refused = committer.commit(committable)
        assert isinstance(refused, RetryLater), refused
        assert refused.until_fixed
        query(postgres_database, "ALTER TABLE elsewhere RENAME TO t")
        assert committer.commit(committable) == Committed()
    assert ids_in(postgres_database, "t") == [1, 2]


def test_a_table_whose_changes_are_published_without_an_identity_is_named_until_it_has_one(
    postgres_database: str, staging: FileStagingArea
) -> None:
    query(
        postgres_database,
        "CREATE TABLE t (id bigint NOT NULL UNIQUE, amount bigint)",
        "INSERT INTO t VALUES (1, 1)",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    upsert: dict[str, Any] = {"write_mode": "upsert", "primary_key": ("id",)}
    sink = sink_of(postgres_database, commit_mode="two_phase", **upsert)
    with Job(sink, schema=SCHEMA) as job:
        writer = job.check().writer()
        writer.write(_ROWS)
        with pytest.raises(errors.TargetRefused, match="REPLICA IDENTITY using ALTER TABLE"):
            writer.pre_commit(CheckpointId(1))
    sink = sink_of(postgres_database, commit_mode="ledger", **upsert)
    with Job(sink, schema=SCHEMA, staging=staging) as job:
        committable, committer = job.check(2).prepare(1, _ROWS, 2), job.committer(2)
        refused = committer.commit(committable)
        assert isinstance(refused, RetryLater)
        assert refused.until_fixed
        query(postgres_database, "ALTER TABLE t REPLICA IDENTITY FULL")
        assert committer.commit(committable) == Committed()
    assert ids_in(postgres_database, "t") == [1, 2]


def test_a_row_that_a_generated_column_refuses_is_a_bad_row_before_its_decision(
    postgres_database: str, staging: FileStagingArea
) -> None:
    query(
        postgres_database,
        "CREATE TABLE t (id bigint, amount bigint, rest smallint NOT NULL"
        " GENERATED ALWAYS AS (1000 / amount) STORED, half bigint GENERATED ALWAYS AS (amount / 2)"
        " STORED, small smallint GENERATED ALWAYS AS (amount) STORED)",
    )
    sink = sink_of(postgres_database, commit_mode="ledger")
    with Job(sink, schema=SCHEMA, staging=staging, on_bad_row=OnBadRow.DROP) as job:
        writer = job.check().writer()
        amounts = [10, 0, None, 40_000, -3]
        writer.write(pa.record_batch([pa.array(range(5)), pa.array(amounts)], schema=SCHEMA))
        (committable,) = writer.pre_commit(CheckpointId(1))
        reasons = [reason for part in writer.take_rejected() for reason in part.reasons]
        for reason, expected in zip(reasons, ("division by zero", "rest", "smallint"), strict=True):
            assert expected in reason
        assert job.committer().commit(committable) == Committed()
    assert ids_in(postgres_database, "t") == [0, 4]


def test_a_decided_commit_whose_right_is_revoked_waits_for_the_grant(
    policed_database: str, postgres_database: str, staging: FileStagingArea
) -> None:
    user = policed_database.partition("//")[2].partition("@")[0]
    query(postgres_database, "ALTER TABLE t DISABLE ROW LEVEL SECURITY")
    sink = sink_of(policed_database, commit_mode="ledger")
    with Job(sink, schema=SCHEMA, staging=staging) as job:
        writer, committer = job.check().writer(), job.committer()
        for number in (2, 3):
            writer.write(_ROWS.set_column(0, SCHEMA.field("id"), pa.array([number, number + 10])))
            (committable,) = writer.pre_commit(CheckpointId(number))
            if number == 2:
                assert committer.commit(committable) == Committed()
                query(postgres_database, f"REVOKE INSERT ON t FROM {user}")
        refused = committer.commit(committable)
        assert isinstance(refused, RetryLater), refused
        assert refused.until_fixed
        assert "permission denied for table t" in refused.reason
        assert refused.reason.endswith("grant the privilege that the server asks for")
        query(postgres_database, f"GRANT INSERT ON t TO {user}")
        assert committer.commit(committable) == Committed()
    assert ids_in(postgres_database, "t") == [1, 2, 3, 12, 13]


@pytest.mark.parametrize("mode", ["two_phase", "ledger"])
@pytest.mark.parametrize("write_mode", ["insert", "upsert", "update"])
def test_a_table_whose_policies_hide_rows_from_the_user_is_refused_at_the_start(
    policed_database: str, staging: FileStagingArea, mode: Mode, write_mode: str
) -> None:
    key = () if write_mode == "insert" else ("id",)
    sink = sink_of(policed_database, write_mode=write_mode, primary_key=key, commit_mode=mode)
    with Job(sink, schema=SCHEMA, staging=staging) as job:
        with pytest.raises(
            errors.ConfigError, match="row-level security applies to the user"
        ) as told:
            job.check()
        assert "BYPASSRLS" in str(told.value)


def test_a_policy_that_a_table_gets_under_a_job_hides_no_row_from_a_change(
    policed_database: str, postgres_database: str, staging: FileStagingArea
) -> None:
    query(postgres_database, "ALTER TABLE t DISABLE ROW LEVEL SECURITY")
    changes: dict[str, Any] = {"write_mode": "update", "primary_key": ("id",)}
    sink = sink_of(policed_database, commit_mode="two_phase", **changes)
    with Job(sink, sink_id="job.prepared", schema=SCHEMA) as job:
        writer = job.check().writer()
        writer.write(_ROWS)
        query(postgres_database, "ALTER TABLE t ENABLE ROW LEVEL SECURITY")
        with pytest.raises(errors.OnceflowError, match="row-level security policy"):
            writer.pre_commit(CheckpointId(1))
    query(postgres_database, "ALTER TABLE t DISABLE ROW LEVEL SECURITY")
    sink = sink_of(policed_database, commit_mode="ledger", **changes)
    with Job(sink, schema=SCHEMA, staging=staging) as job:
        committable = job.check().prepare(1, _ROWS)
        query(postgres_database, "ALTER TABLE t ENABLE ROW LEVEL SECURITY")
        outcome = job.committer().commit(committable)
        assert isinstance(outcome, RetryLater), outcome
        assert "row-level security applies to the user" in outcome.reason
        assert query(postgres_database, "SELECT id, amount FROM t") == [(1, 1)]
        query(postgres_database, "ALTER TABLE t DISABLE ROW LEVEL SECURITY")
        assert job.committer().commit(committable) == Committed()
    assert query(postgres_database, "SELECT id, amount FROM t") == [(1, 10)]


@pytest.mark.parametrize("mode", ["two_phase", "ledger"])
def test_upserts_into_a_table_that_others_inherit_from_are_refused_at_the_start(
    postgres_database: str, staging: FileStagingArea, mode: Mode
) -> None:
    """No unique index covers the rows of both, so that a key of a child would be there twice."""
    query(
        postgres_database,
        "CREATE TABLE t (id bigint PRIMARY KEY, amount bigint)",
        "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (t)",
        "INSERT INTO child VALUES (1, 1)",
    )
    for attempt, write_mode in enumerate(("upsert", "ignore"), 1):
        sink = sink_of(
            postgres_database, write_mode=write_mode, primary_key=("id",), commit_mode=mode
        )
        with (
            Job(sink, schema=SCHEMA, staging=staging) as job,
            pytest.raises(errors.ConfigError, match="table child inherits from it"),
        ):
            job.check(attempt)
    # An update reaches the rows of children.
    sink = sink_of(postgres_database, write_mode="update", primary_key=("id",), commit_mode=mode)
    with Job(sink, schema=SCHEMA, staging=staging) as job:
        committable = job.check(3).prepare(1, _ROWS, attempt=3)
        assert job.committer(3).commit(committable) == Committed()
    assert query(postgres_database, "SELECT id, amount FROM t") == [(1, 10)]


@pytest.mark.parametrize("event", ["INSERT", "UPDATE"])
def test_upserts_into_a_table_with_a_rule_are_refused_at_the_start(
    postgres_database: str, staging: FileStagingArea, event: str
) -> None:
    """The server refuses their statements, in ledger mode only after the decision."""
    query(
        postgres_database,
        "CREATE TABLE t (id bigint PRIMARY KEY, amount bigint)",
        f'CREATE RULE "a rule" AS ON {event} TO t DO ALSO NOTHING',
    )
    advice = ""
    for attempt, write_mode in enumerate(("upsert", "ignore"), 1):
        sink = sink_of(postgres_database, write_mode=write_mode, primary_key=("id",))
        with (
            Job(sink, schema=SCHEMA, staging=staging) as job,
            pytest.raises(errors.ConfigError, match="rule a rule the server refuses") as failure,
        ):
            job.check(attempt)
        advice = str(failure.value).rpartition("run: ")[2]
    query(postgres_database, advice)
    sink = sink_of(postgres_database, write_mode="ignore", primary_key=("id",))
    with Job(sink, schema=SCHEMA, staging=staging) as job:
        committable = job.check(3).prepare(1, _ROWS, attempt=3)
        assert job.committer(3).commit(committable) == Committed()
    assert ids_in(postgres_database, "t") == [1, 2]


def test_upserts_into_a_table_that_gets_a_child_under_a_job_add_no_key_twice(
    postgres_database: str,
) -> None:
    query(postgres_database, "CREATE TABLE t (id bigint PRIMARY KEY, amount bigint)")
    sink = sink_of(
        postgres_database, write_mode="upsert", primary_key=("id",), commit_mode="two_phase"
    )
    with Job(sink, schema=SCHEMA) as job:
        writer = job.check().writer()
        query(
            postgres_database,
            "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (t)",
            "INSERT INTO child VALUES (1, 1)",
        )
        writer.write(_ROWS)
        with pytest.raises(errors.PreCommitFailed, match="table child inherits from it"):
            writer.pre_commit(CheckpointId(1))
    assert query(postgres_database, "SELECT id, amount FROM t") == [(1, 1)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("-c nosuch=1", "unrecognized configuration parameter"),
        ("-c work_mem=x", "invalid value for parameter"),
        ("-c port=1", "cannot be changed without restarting"),
        ("-x", "invalid command-line argument"),
    ],
)
def test_option_that_no_server_takes_is_a_setting_that_is_refused(
    postgres_database: str, options: str, reason: str
) -> None:
    separator = "&" if "?" in postgres_database else "?"
    sink = sink_of(f"{postgres_database}{separator}options={quote(options)}")
    with pytest.raises(errors.SettingsRefused, match=reason):
        sink.endpoint.connect("a test")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("28P01", errors.SettingsRefused),
        ("3D000", errors.SettingsRefused),
        ("42704", errors.SettingsRefused),
        ("22023", errors.SettingsRefused),
        ("57P03", errors.SinkError),
        ("53300", errors.SinkError),
    ],
)
def test_code_of_a_refused_start_counts_whatever_language_its_text_has(
    code: str, kind: type[errors.OnceflowError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise psycopg.errors.lookup(code)("Die Datenbank lehnt die Verbindung ab")

    monkeypatch.setattr(psycopg.Connection, "connect", refuse)
    with pytest.raises(errors.OnceflowError, match="lehnt die Verbindung ab") as refused:
        sink_of("postgresql://app@db.invalid/shop").endpoint.connect("a test")
    assert type(refused.value) is kind


def test_a_table_outside_of_the_search_path_is_named(postgres_database: str) -> None:
    query(postgres_database, "CREATE SCHEMA bank", "CREATE TABLE bank.t (id bigint)")
    with (
        Job(sink_of(postgres_database), schema=SCHEMA) as job,
        pytest.raises(errors.ConfigError, match=r"If you mean 'bank\.t', pass that name as table="),
    ):
        job.check()
