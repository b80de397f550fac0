"""What is refused before a job writes anything, and what the refusal says to do."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest
from tests.integration.postgres_sink_kit import Job, ids_in, ledger_rows, query
from tests.integration.sink_kit import SCHEMA, rows

from onceflow.core.errors import ConfigError, Fenced, OnceflowError, SinkError
from onceflow.core.protocol.committables import Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.integration.servers import EmbeddedPostgres
from onceflow.sinks import PostgresSink

PASSWORD = "hunter2-correct-horse"


@pytest.fixture(scope="module")
def guarded() -> Iterator[EmbeddedPostgres]:
    """A server without prepared transactions, on which the role `writer` needs a password."""
    with EmbeddedPostgres(
        {"max_prepared_transactions": "0"},
        hba_lines=["host all writer 127.0.0.1/32 scram-sha-256"],
    ) as server:
        query(server.url, f"CREATE ROLE writer LOGIN PASSWORD '{PASSWORD}'")
        yield server


def _refused(sink: PostgresSink, kind: type[OnceflowError] = ConfigError) -> str:
    with Job(sink) as job, pytest.raises(kind) as failure:
        job.check()
    assert type(failure.value) is kind
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)
    return str(failure.value)


def _port(server: EmbeddedPostgres) -> str:
    return f"127.0.0.1:{server.port}"


def test_server_without_prepared_transactions_is_told_the_statement(
    guarded: EmbeddedPostgres,
) -> None:
    text = _refused(PostgresSink(guarded.url, table="ledger", create=True))
    assert "ALTER SYSTEM SET max_prepared_transactions = 64; then restart" in text
    assert query(guarded.url, "SELECT to_regclass('ledger'), to_regnamespace('onceflow')") == [
        (None, None)
    ]


def test_at_least_once_needs_no_prepared_transactions(guarded: EmbeddedPostgres) -> None:
    sink = PostgresSink(guarded.url, table="loose", create=True, delivery="at_least_once")
    with Job(sink) as job:
        writer = job.check().writer()
        writer.write(rows([1]))
        writer.pre_commit(CheckpointId(1))
    assert ids_in(guarded.url, "loose") == [1]


@pytest.mark.parametrize(
    ("user", "password", "database", "expected"),
    [
        ("writer", "wrong", "postgres", "password authentication failed"),
        ("writer", "", "postgres", "no password supplied"),
        ("nobody", "", "postgres", 'role "nobody" does not exist'),
        ("postgres", "", "nowhere", 'database "nowhere" does not exist'),
    ],
)
def test_refused_login_names_where_and_whom_and_never_the_password(
    guarded: EmbeddedPostgres, user: str, password: str, database: str, expected: str
) -> None:
    url = f"postgresql://{user}:{password}@{_port(guarded)}/{database}"
    text = _refused(PostgresSink(url, table="ledger"))
    assert expected in text
    for part in (user, database, str(guarded.port), "127.0.0.1"):
        assert part in text
    assert "wrong" not in text


def test_right_password_is_never_seen(
    guarded: EmbeddedPostgres, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    query(guarded.url, "CREATE TABLE hidden (id bigint, account text)")
    query(guarded.url, "GRANT ALL ON hidden TO writer")
    seen: list[str] = []
    for url in (
        f"postgresql://writer:{PASSWORD}@{_port(guarded)}/postgres",
        f"jdbc:postgresql://{_port(guarded)}/postgres?user=writer&password={PASSWORD}",
        f"postgresql+psycopg://writer:{PASSWORD}@{_port(guarded)}/postgres",
    ):
        sink = PostgresSink(url, table="hidden", delivery="at_least_once")
        seen += [repr(sink), _refused(sink)]
        assert "no column 'amount'" in seen[-1], "the password opened the door"
    sink = PostgresSink(
        f"postgresql://writer@{_port(guarded)}/postgres", table="hidden", password=PASSWORD
    )
    with Job(sink) as job:
        committer = job.committer()
        with pytest.raises(ConfigError) as failure:
            job.writer()
        seen += [repr(committer), repr(sink), repr(failure.value), repr(vars(committer))]
    assert PASSWORD not in "".join(seen)
    assert PASSWORD not in caplog.text


def test_unknown_host_and_closed_port_are_told_apart() -> None:
    text = _refused(PostgresSink("postgresql://u:p@no-such-host.invalid/db", table="t"))
    assert "no-such-host.invalid" in text
    # A server that is not running may be back soon: that is no wrong setting.
    text = _refused(PostgresSink("postgresql://u:p@127.0.0.1:1/db", table="t"), SinkError)
    assert "127.0.0.1:1" in text
    assert "refused" in text


def test_missing_table_is_answered_with_the_statement_that_creates_it(
    postgres_database: str,
) -> None:
    text = _refused(PostgresSink(postgres_database, table="ledger"))
    assert "create=True" in text
    statement = text[text.index("CREATE TABLE") :]
    query(postgres_database, statement)
    with Job(PostgresSink(postgres_database, table="ledger")) as job:
        job.check(attempt=2)


def test_table_is_created_once_and_kept(postgres_database: str) -> None:
    sink = PostgresSink(
        postgres_database, table="ledger", create=True, primary_key=("id", "account")
    )
    with Job(sink) as job:
        job.check()
        job.committer().commit(job.prepare(1, [1]))
        job.check(attempt=2)
    assert ids_in(postgres_database) == [1]
    columns = query(
        postgres_database,
        "SELECT attname, format_type(atttypid, atttypmod), attnotnull FROM pg_attribute "
        "WHERE attrelid = 'ledger'::regclass AND attnum > 0 ORDER BY attnum",
    )
    assert columns == [
        ("id", "bigint", True),
        ("account", "text", True),
        ("amount", "bigint", False),
    ]
    assert query(
        postgres_database,
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'p' "
        "AND conrelid = 'ledger'::regclass",
    ) == [("PRIMARY KEY (id, account)",)]


def test_names_keep_their_case_and_odd_characters(postgres_database: str) -> None:
    query(postgres_database, 'CREATE SCHEMA "Büro"')
    schema = pa.schema([("Größe %", pa.int64()), ('a"b', pa.string()), ("order", pa.string())])
    sink = PostgresSink(postgres_database, table="Büro.Sales %s", create=True)
    with Job(sink, schema=schema) as job:
        writer = job.check().writer()
        writer.write(pa.record_batch([[1], ["x"], ["y"]], schema=schema))
        committable = writer.pre_commit(CheckpointId(1))
        assert committable is not None
        assert job.committer().commit(committable) == Committed()
    assert query(postgres_database, 'SELECT "Größe %", "a""b", "order" FROM "Büro"."Sales %s"') == [
        (1, "x", "y")
    ]


def test_table_is_not_created_while_the_sink_has_something_in_doubt(
    postgres_database: str,
) -> None:
    with Job(PostgresSink(postgres_database, table="old", create=True)) as job:
        job.check()
        job.prepare(1, [1])
    with Job(PostgresSink(postgres_database, table="new", create=True)) as job:
        with pytest.raises(ConfigError, match=r"in doubt.*job\.ledger/1/1/0/0"):
            job.check(attempt=2)
        assert query(postgres_database, "SELECT to_regclass('new')") == [(None,)]
        (orphan,) = job.committer().in_doubt()
        job.committer().commit(orphan)
        job.check(attempt=3)
        assert query(postgres_database, "SELECT to_regclass('new')") == [("new",)]


def test_columns_go_by_name_and_others_get_their_defaults(postgres_database: str) -> None:
    query(
        postgres_database,
        "CREATE TABLE ledger (note text DEFAULT 'none', amount bigint, n serial, id bigint, "
        "twice bigint GENERATED ALWAYS AS (id * 2) STORED, account text)",
    )
    with Job(PostgresSink(postgres_database, table="ledger")) as job:
        job.check().committer().commit(job.prepare(1, [3]))
    assert query(postgres_database, "SELECT id, account, amount, note, n, twice FROM ledger") == [
        (3, "acct-3", 30, "none", 1, 6)
    ]


def test_every_column_at_fault_is_named_with_both_types(postgres_database: str) -> None:
    query(
        postgres_database,
        "CREATE TABLE ledger (id text, amount bigint GENERATED ALWAYS AS (1) STORED, "
        "must numeric(10,2) NOT NULL)",
    )
    text = _refused(PostgresSink(postgres_database, table="ledger"))
    assert "column 'id' has Arrow type int64 in the rows and Postgres type text" in text
    assert "no column 'account'" in text
    assert "'amount' is generated" in text
    assert "'must' is NOT NULL without a default" in text


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("CREATE VIEW ledger AS SELECT 1::bigint AS id", "is a view"),
        ("CREATE UNLOGGED TABLE ledger (id bigint)", "ALTER TABLE public.ledger SET LOGGED"),
    ],
)
def test_what_would_not_keep_rows_is_refused(
    postgres_database: str, statement: str, expected: str
) -> None:
    query(postgres_database, statement)
    assert expected in _refused(PostgresSink(postgres_database, table="ledger"))


def test_role_that_may_not_insert_is_told_the_grant(postgres_database: str) -> None:
    query(postgres_database, "CREATE TABLE ledger (id bigint, account text, amount bigint)")
    query(postgres_database, "DROP ROLE IF EXISTS reader; CREATE ROLE reader LOGIN")
    try:
        sink = PostgresSink(postgres_database, table="ledger", user="reader")
        text = _refused(sink)
        assert "CREATE SCHEMA IF NOT EXISTS onceflow" in text
        statements = text[text.index("CREATE SCHEMA") : text.index("; or name a schema")]
        query(postgres_database, statements)
        query(postgres_database, _refused(sink).rpartition("Run: ")[2])
        with Job(sink) as job:
            # The refused check has claimed attempt 1 already.
            job.check(attempt=2)
            assert job.committer().commit(job.prepare(1, [1], attempt=2)) == Committed()
    finally:
        query(postgres_database, "DROP OWNED BY reader; DROP ROLE reader")


def test_standby_and_read_only_databases_are_refused(postgres_database: str) -> None:
    name = postgres_database.rpartition("/")[2]
    query(postgres_database, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    assert "default_transaction_read_only" in _refused(
        PostgresSink(postgres_database, table="ledger", create=True)
    )


def test_too_few_prepared_transactions_for_the_parallelism_are_refused(
    postgres_database: str,
) -> None:
    with Job(PostgresSink(postgres_database, table="ledger", create=True)) as job:
        job.check()
        with pytest.raises(ConfigError, match=r"is 64 and parallelism 33 needs 66.*= 132"):
            job.writer(parallelism=33)
        job.writer(parallelism=32)


def test_other_job_is_refused_and_told_how_to_take_over(postgres_database: str) -> None:
    sink = PostgresSink(postgres_database, table="ledger", create=True)
    with Job(sink) as job, Job(sink, log_id="log-2") as other:
        job.check(attempt=5)
        with pytest.raises(ConfigError, match=r"'log-1'.*'log-2'") as failure:
            other.check(attempt=9)
        statement = str(failure.value).rpartition(": ")[2]
        query(postgres_database, statement)
        other.check(attempt=1)
        with pytest.raises(ConfigError):
            job.check(attempt=6)


def test_attempts_only_go_up(postgres_database: str) -> None:
    with Job(PostgresSink(postgres_database, table="ledger", create=True)) as job:
        job.check(attempt=3)
        for attempt in (1, 2, 3):
            with pytest.raises(Fenced, match=f"attempt {attempt} may not write"):
                job.check(attempt=attempt)
        job.check(attempt=4)


def test_attempts_that_check_at_once_leave_the_newest_in_charge(postgres_database: str) -> None:
    """Nothing exists yet, so they also create everything at once."""
    sink = PostgresSink(postgres_database, table="ledger", create=True)
    failures: list[BaseException] = []
    barrier = threading.Barrier(8)

    def check(attempt: int) -> None:
        with Job(sink) as job:
            barrier.wait(10)
            try:
                job.check(attempt)
            except Fenced:
                pass
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=check, args=(attempt,)) for attempt in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert query(postgres_database, "SELECT attempt FROM onceflow.onceflow_sinks") == [(8,)]


def test_two_jobs_that_claim_one_sink_at_once_are_not_both_admitted(postgres_database: str) -> None:
    sink = PostgresSink(postgres_database, table="ledger", create=True)
    with Job(sink, sink_id="other") as other:
        other.check()
    for number in range(10):
        barrier = threading.Barrier(6)
        admitted: list[str] = []

        def check(log_id: str, number: int = number) -> None:
            with Job(sink, sink_id=f"sink{number}", log_id=log_id) as job:
                barrier.wait(10)
                with contextlib.suppress(ConfigError):
                    job.check()
                    admitted.append(log_id)

        threads = [threading.Thread(target=check, args=(f"log-{one}",)) for one in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(admitted) == 1
        assert query(
            postgres_database,
            f"SELECT log_id FROM onceflow.onceflow_sinks WHERE sink_id = 'sink{number}'",
        ) == [(admitted[0],)]


def test_different_sinks_that_start_at_once_share_the_ledger(postgres_database: str) -> None:
    barrier = threading.Barrier(6)
    failures: list[BaseException] = []

    def run(number: int) -> None:
        sink = PostgresSink(postgres_database, table=f"t{number}", create=True)
        with Job(sink, sink_id=f"sink{number}") as job:
            barrier.wait(10)
            try:
                job.check().committer().commit(job.prepare(1, [number]))
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert ledger_rows(postgres_database) == [f"sink{number}/1/1/0/0" for number in range(6)]


def test_ledger_may_be_in_a_schema_of_choice(postgres_database: str) -> None:
    sink = PostgresSink(postgres_database, table="ledger", create=True, ledger_schema="public")
    with Job(sink) as job:
        job.check().committer().commit(job.prepare(1, [1]))
    assert query(postgres_database, "SELECT transaction_id FROM public.onceflow_ledger") == [
        ("job.ledger/1/1/0/0",)
    ]


def test_columns_that_come_twice_or_not_at_all_are_refused(postgres_database: str) -> None:
    query(postgres_database, "CREATE TABLE ledger (id bigint)")
    twice = pa.schema([("id", pa.int64()), ("id", pa.int64())])
    for number, schema in enumerate((twice, pa.schema([]))):
        with (
            Job(PostgresSink(postgres_database, table="ledger"), schema=schema) as job,
            pytest.raises(ConfigError, match="different names"),
        ):
            job.check(attempt=number + 1)


def test_primary_key_that_is_no_column_is_refused(postgres_database: str) -> None:
    sink = PostgresSink(postgres_database, table="ledger", create=True, primary_key=("nr",))
    assert "primary_key names nr" in _refused(sink)
    assert SCHEMA.names == ["id", "account", "amount"]


def test_check_leaves_no_session_behind(postgres_database: str) -> None:
    with Job(PostgresSink(postgres_database, table="ledger", create=True)) as job:
        job.check()
        deadline = time.monotonic() + 10
        left = "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
        while ours := [name for (name,) in query(postgres_database, left) if "onceflow" in name]:
            assert time.monotonic() < deadline, ours
