"""Tests the refusals before a job writes anything, and the advice in them."""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from tests.integration.sink_kit import eventually
from tests.integration.sql.databases import PASSWORD, SECRETS, Database, SqlJob, SqlSink

from onceflow.core import errors
from onceflow.core.protocol.committables import Committed, RetryLater, Unknown
from onceflow.core.storage import FileStagingArea


@dataclass(frozen=True)
class _Dialect:
    """The statements of these tests for one kind of database, and its messages."""

    refused_logins: dict[str, str]
    """What is said of each login to the database."""
    refused_databases: dict[str, tuple[str, str]]
    """What is said of each database to the login, a known user's (`{user}`) or an owner's."""
    said_of_doubles: str
    """What is said of columns with one name."""
    driver: str
    """What Python's tools write after the scheme of a URL."""
    key_text: str
    """The type of a text column that is part of a key, in tables that onceflow creates."""
    loose_table: str
    """A statement that creates the table `ledger` so that it would not keep rows."""
    said_of_loose: str
    read_only: tuple[str, str]
    """A statement that lets nobody write any more to `{database}`, and one that takes it back."""
    said_of_read_only: str
    read_only_default: tuple[str, str]
    """The same for transactions that do not say that they write."""
    writes_again: tuple[str, ...]
    """What lets a session write that was opened meanwhile."""
    grants: dict[str, int]
    """How often a user is refused who does all that is said, by write mode."""
    all_of_schema: str
    """What lets a user do everything in `{schema}`."""
    modes_that_update: tuple[str, ...]
    """The write modes that need the privilege."""
    lists_for_all: bool
    """Whether everybody may list what is prepared."""
    rounds: int
    """How often two jobs race."""


_POSTGRES = _Dialect(
    refused_logins={
        f"{{user}}:{SECRETS[1]}-not": "password authentication failed",
        "{user}": "no password supplied",
        f"nobody:{SECRETS[1]}": 'role "nobody" does not exist',
    },
    refused_databases={"nowhere": ("postgres", 'database "nowhere" does not exist')},
    said_of_doubles="different names",
    driver="psycopg",
    key_text="text",
    loose_table="CREATE UNLOGGED TABLE ledger (id bigint)",
    said_of_loose='ALTER TABLE "public"."ledger" SET LOGGED',
    read_only=("ALTER DATABASE {database} SET default_transaction_read_only = on", "SELECT 1"),
    said_of_read_only="default_transaction_read_only",
    read_only_default=(
        "ALTER DATABASE {database} SET default_transaction_read_only = on",
        "ALTER DATABASE {database} RESET default_transaction_read_only",
    ),
    writes_again=("SET default_transaction_read_only = off",),
    grants={"insert": 2, "upsert": 3},
    all_of_schema="ALL ON SCHEMA {schema}",
    modes_that_update=("upsert", "update"),
    lists_for_all=True,
    rounds=10,
)
_MYSQL: dict[str, Any] = {
    "refused_logins": {
        f"{{user}}:{SECRETS[1]}-not": "Access denied",
        "{user}": "Access denied",
        f"nobody:{SECRETS[1]}": "Access denied",
    },
    "refused_databases": {
        "mysql": (f"{{user}}:{SECRETS[1]}", "Access denied"),
        "nowhere": ("root:onceflow", "Unknown database 'nowhere'"),
    },
    "said_of_doubles": "whose names differ",
    "driver": "pymysql",
    "key_text": "varchar",
    "loose_table": "CREATE TABLE ledger (id bigint) ENGINE = MyISAM",
    "said_of_loose": "ENGINE = InnoDB",
    "read_only": ("SET GLOBAL read_only = ON", "SET GLOBAL read_only = OFF"),
    "said_of_read_only": "is read-only, as replicas are",
    "writes_again": (),
    "all_of_schema": "ALL ON {schema}.*",
    "modes_that_update": ("upsert", "ignore", "update"),
    "rounds": 5,
}


def _switch(variable: str) -> tuple[str, str]:
    return f"SET GLOBAL {variable} = ON", f"SET GLOBAL {variable} = OFF"


_DIALECTS = {
    "postgres": _POSTGRES,
    "mysql": _Dialect(
        **_MYSQL,
        grants={"insert": 2, "upsert": 5},
        lists_for_all=False,
        read_only_default=_switch("transaction_read_only"),
    ),
    "mariadb": _Dialect(
        **_MYSQL,
        grants={"insert": 1, "upsert": 4},
        lists_for_all=True,
        read_only_default=_switch("tx_read_only"),
    ),
}


@pytest.fixture
def dialect(kind: type[Database]) -> _Dialect:
    return _DIALECTS[kind.name]


def _refused(
    sink: SqlSink, kind: type[errors.OnceflowError] = errors.ConfigError, *, attempt: int = 1
) -> str:
    with SqlJob(sink) as job, pytest.raises(kind) as failure:
        job.check(attempt)
    assert type(failure.value) is kind
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)
    return str(failure.value)


def _no_secret_in(text: str) -> None:
    assert not [secret for secret in SECRETS if secret in text]


# -- who may come in -------------------------------------------------------------------------------


def test_refused_login_names_where_and_whom_and_never_the_password(
    guarded: Database, dialect: _Dialect
) -> None:
    place = urlsplit(guarded.url)
    with guarded.user() as known:
        user = str(urlsplit(known.url).username)
        name = guarded.database_name
        attempts = [(login, name, said) for login, said in dialect.refused_logins.items()]
        attempts += [(login, there, said) for there, (login, said) in
                     dialect.refused_databases.items()]  # fmt: skip
        for template, database, said in attempts:
            login = template.format(user=user)
            sink = guarded.by_login(login, database).sink(table="ledger")
            text = _refused(sink, errors.SettingsRefused)
            assert said in text
            for part in (login.partition(":")[0], database, str(place.hostname), str(place.port)):
                assert part in text
            _no_secret_in(text)


def test_right_password_is_never_seen(
    guarded: Database, dialect: _Dialect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    guarded.query("CREATE TABLE hidden (id bigint, account text)")
    with guarded.user(*guarded.grants_of_job) as known:
        place, kind = urlsplit(known.url), type(known)
        where = f"{place.hostname}:{place.port}{place.path}"
        seen: list[str] = []
        for url, settings in (
            (known.url, {}),
            (f"jdbc:{kind.scheme}://{where}?user={place.username}&password={SECRETS[1]}", {}),
            (known.url.replace("://", f"+{dialect.driver}://"), {}),
            (f"{kind.scheme}://{place.username}@{where}", {"password": PASSWORD}),
            (f"{kind.scheme}://{where}", {"user": place.username, "password": PASSWORD}),
        ):
            sink = kind(url).sink(table="hidden", delivery="at_least_once", **settings)
            seen += [repr(sink), repr(sink.settings), _refused(sink)]
            assert "no column 'amount'" in seen[-1], "the password opened the door"
            with SqlJob(kind(url).sink(table="hidden", **settings)) as job:
                committer = job.committer()
                with pytest.raises(errors.ConfigError, match="no column 'amount'") as failure:
                    job.writer()
                seen += [repr(committer), repr(vars(committer)), repr(failure.value)]
    _no_secret_in("".join(seen))
    _no_secret_in(caplog.text)


def test_unknown_host_and_closed_port_are_told_apart(kind: type[Database]) -> None:
    text = _refused(
        kind(f"{kind.scheme}://u:p@no-such-host.invalid/db").sink(table="t"), errors.SettingsRefused
    )
    assert "no-such-host.invalid" in text
    # A server that is not running may be back soon: that is no wrong setting.
    text = _refused(kind(f"{kind.scheme}://u:p@127.0.0.1:1/db").sink(table="t"), errors.SinkError)
    assert "127.0.0.1:1" in text
    assert "refused" in text


_DEMANDING = {"write_mode": "upsert", "primary_key": ("id",), "tombstones": True}


@pytest.mark.parametrize("write_mode", ["insert", "upsert"])
def test_what_a_user_may_not_is_told_with_the_grant_until_nothing_is_missing(
    database: Database, dialect: _Dialect, write_mode: str
) -> None:
    """An operator who runs whatever the error says arrives at a job that writes."""
    database.query("CREATE TABLE ledger (id bigint PRIMARY KEY, account text, amount bigint)")
    settings = {"insert": {}, "upsert": _DEMANDING}[write_mode]
    with database.new_schema("books") as books, database.user("SELECT ON ledger") as limited:
        if write_mode == "upsert":
            settings = {**settings, "ledger_schema": books}
        sink = limited.sink(table="ledger", commit_mode="two_phase", **settings)
        told: list[str] = []
        for attempt in range(1, 10):
            with SqlJob(sink) as job:
                try:
                    job.check(attempt)
                    committable = job.prepare(1, [1, 2], attempt=attempt)
                    assert job.committer(attempt).commit(committable) == Committed()
                    break
                except errors.SinkError as error:
                    raise AssertionError(f"not found by the check: {error}") from error
                except errors.ConfigError as error:
                    told.append(str(error))
            _run_what_is_said(database, told[-1])
        assert database.ids_in() == [1, 2]
    assert len(told) == dialect.grants[write_mode], told
    assert len(set(told)) == len(told), "each statement fixed what it was said for"
    assert ("GRANT XA_RECOVER_ADMIN" in " ".join(told)) == (not dialect.lists_for_all)


def _run_what_is_said(database: Database, text: str) -> None:
    """Run every statement in the text of an error, up to where its sentence ends."""
    for part in re.split(r"(?:Run|Fix)[^:]*: |; ", text):
        if part.startswith(("GRANT ", "CREATE ")):
            database.query(part)


@pytest.mark.parametrize("write_mode", ["upsert", "ignore", "update"])
def test_privileges_on_the_columns_of_the_stream_are_enough(
    database: Database, dialect: _Dialect, staging: FileStagingArea, write_mode: str
) -> None:
    database.query(
        "CREATE TABLE ledger (id bigint PRIMARY KEY, account text, amount bigint, no text)"
    )
    columns = "(id, account, amount)"
    with database.new_schema("books") as books:
        database.query(f"CREATE SCHEMA {books}")
        grants = (
            dialect.all_of_schema.format(schema=books),
            f"INSERT {columns}, SELECT {columns} ON ledger",
        )
        with database.user(*grants) as limited:
            sink = limited.sink(
                table="ledger", write_mode=write_mode, primary_key=("id",),
                ledger_schema=books, commit_mode="ledger",
            )  # fmt: skip
            with SqlJob(sink, staging=staging) as job:
                told = _refusals(job)
                user = urlsplit(limited.url).username
                database.query(f"GRANT UPDATE {columns} ON ledger TO {user}")
                committer = job.check(2).committer(2)
                for checkpoint in (1, 2):
                    outcome = committer.commit(job.prepare(checkpoint, [1, 2], attempt=2))
                    assert outcome == Committed()
    table = f"{database.quoted(database.schema)}.{database.quoted('ledger')}"
    assert [f"GRANT UPDATE ON {table} TO" in text for text in told] == [
        True for mode in dialect.modes_that_update if mode == write_mode
    ]
    assert database.ids_in() == ([] if write_mode == "update" else [1, 2])


def _refusals(job: SqlJob) -> list[str]:
    """Return what a check says that refuses, if it does."""
    try:
        job.check()
    except errors.ConfigError as error:
        return [str(error)]
    return []


def test_read_only_server_is_refused(database: Database, dialect: _Dialect) -> None:
    begin, end = (one.format(database=database.database_name) for one in dialect.read_only)
    database.query(begin)
    try:
        text = _refused(database.sink(table="ledger", create=True))
    finally:
        database.query(end)
    assert dialect.said_of_read_only in text
    assert database.tables() == []


@pytest.mark.parametrize("commit_mode", ["two_phase", "ledger"])
def test_a_running_job_does_not_write_to_a_server_that_is_made_read_only(
    database: Database, dialect: _Dialect, staging: FileStagingArea, commit_mode: str
) -> None:
    begin, end = (one.format(database=database.database_name) for one in dialect.read_only_default)
    sink = database.sink(table="ledger", create=True, commit_mode=commit_mode)
    with SqlJob(sink, staging=staging) as job:
        job.check()
        before = job.prepare(1, [1])
        database.query(begin)
        try:
            writes = job.committer()
            with contextlib.suppress(errors.SinkError):
                job.prepare(2, [2])
                assert commit_mode == "ledger", "its rows wait in checkpoint storage"
            if commit_mode == "ledger":
                assert isinstance(writes.commit(before), RetryLater | Unknown)
            assert 2 not in database.ids_in()
            assert "transactions are read-only" in _refused(database.sink(table="ledger"))
        finally:
            database.query(*dialect.writes_again, end)
        assert writes.commit(before) == Committed()
        assert database.ids_in() == [1]


def test_check_leaves_no_session_behind(database: Database) -> None:
    with database.job(table="ledger", create=True) as job:
        job.check()
        eventually(lambda: database.sessions() == [], timeout_s=60)


# -- the table -------------------------------------------------------------------------------------


def test_missing_table_is_answered_with_the_statement_that_creates_it(database: Database) -> None:
    text = _refused(database.sink(table="ledger"))
    assert "create=True" in text
    database.query(text[text.index("CREATE TABLE") :])
    with database.job(table="ledger") as job:
        job.check(attempt=2)
        assert job.committer(2).commit(job.prepare(1, [1], attempt=2)) == Committed()
    assert database.ids_in() == [1]


def test_missing_table_is_answered_with_a_table_whose_name_differs_in_case(
    database: Database,
) -> None:
    database.query(f"CREATE TABLE {database.quoted('Ledger')} (id bigint PRIMARY KEY)")
    text = _refused(database.sink(table="ledger"))
    assert "Ledger', pass that name as table=. Otherwise pass create=True" in text


def test_table_is_created_once_and_kept(database: Database, dialect: _Dialect) -> None:
    with database.job(table="ledger", create=True, primary_key=("id", "account")) as job:
        job.check().committer().commit(job.prepare(1, [1]))
        job.check(attempt=2)
    assert database.ids_in() == [1]
    assert database.columns() == [
        ("id", "bigint", False),
        ("account", dialect.key_text, False),
        ("amount", "bigint", True),
    ]
    key = database.query(
        "SELECT column_name FROM information_schema.key_column_usage "
        "JOIN information_schema.table_constraints "
        "USING (table_schema, table_name, constraint_name) "
        f"WHERE constraint_type = 'PRIMARY KEY' AND table_schema = '{database.schema}' "
        "AND table_name = 'ledger' ORDER BY ordinal_position"
    )
    assert key == [("id",), ("account",)]


def test_table_is_not_created_while_the_sink_has_something_in_doubt(database: Database) -> None:
    with database.job(table="old", create=True) as job:
        job.check().prepare(1, [1])
    with database.job(table="new", create=True) as job:
        with pytest.raises(errors.ConfigError, match=r"in doubt.*job\.ledger/1/1/0/0"):
            job.check(attempt=2)
        assert "new" not in database.tables()
        (orphan,) = job.committer().in_doubt()
        job.committer().commit(orphan)
        job.check(attempt=3)
        assert "new" in database.tables()


def test_names_keep_their_case_and_odd_characters(database: Database) -> None:
    names = ("Größe %", 'a"b', "c`d", "order")
    schema = pa.schema([(names[0], pa.int64()), *((name, pa.string()) for name in names[1:])])
    with database.new_schema("Büro") as office:
        database.query(f"CREATE SCHEMA {database.quoted(office)}")
        sink = database.sink(table=f"{office}.Sales %s`s", create=True)
        with SqlJob(sink, schema=schema) as job:
            _commit(job, pa.record_batch([[1], ["x"], ["y"], ["z"]], schema=schema))
        table = f"{database.quoted(office)}.{database.quoted('Sales %s`s')}"
        columns = ", ".join(map(database.quoted, names))
        assert database.query(f"SELECT {columns} FROM {table}") == [(1, "x", "y", "z")]


def test_columns_go_by_name_and_others_get_their_defaults(database: Database) -> None:
    odd, size, order, table = map(database.quoted, ('a"b', "Größe %", "order", "Sales %s`s"))
    database.query(
        f"CREATE TABLE {table} (note varchar(9) DEFAULT 'none', {order} text, n serial, "
        f"{size} bigint, twice bigint GENERATED ALWAYS AS ({size} * 2) STORED, {odd} text)"
    )
    schema = pa.schema([("Größe %", pa.int64()), ('a"b', pa.string()), ("order", pa.string())])
    with SqlJob(database.sink(table="Sales %s`s"), schema=schema) as job:
        _commit(job, pa.record_batch([[3], ["x"], ["y"]], schema=schema))
    assert database.query(f"SELECT * FROM {table}") == [("none", "y", 1, 3, 6, "x")]


def _commit(job: SqlJob, batch: pa.RecordBatch) -> None:
    """Check, and commit `batch` as all that the job writes."""
    committable = job.check().prepare(1, batch)
    assert job.committer().commit(committable) == Committed()


def test_every_column_at_fault_is_named_with_both_types(database: Database) -> None:
    database.query(
        "CREATE TABLE ledger (id text, amount bigint GENERATED ALWAYS AS (1) STORED, "
        "must numeric(10,2) NOT NULL)"
    )
    text = _refused(database.sink(table="ledger"))
    assert f"column 'id' has Arrow type int64 in the rows and {database.type_word} text" in text
    assert "no column 'account'" in text
    assert "'amount' is generated" in text
    assert "'must' is NOT NULL without a default" in text


def test_columns_that_come_twice_or_not_at_all_are_refused(
    database: Database, dialect: _Dialect
) -> None:
    database.query("CREATE TABLE ledger (id bigint)")
    twice = pa.schema([("id", pa.int64()), ("id", pa.int64())])
    none = "the rows have no columns, so there is nothing to write"
    refused = (
        ("ledger", twice, dialect.said_of_doubles),
        ("ledger", pa.schema([]), none),
        ("new", pa.schema([]), none),
    )
    for attempt, (table, schema, said) in enumerate(refused, 1):
        with (
            SqlJob(database.sink(table=table, create=True), schema=schema) as job,
            pytest.raises(errors.ConfigError, match=said),
        ):
            job.check(attempt)


def test_rows_that_have_no_column_of_the_table_yet_are_accepted_with_evolve(
    database: Database,
) -> None:
    database.query("CREATE TABLE ledger (other bigint)")
    schema = pa.schema([("id", pa.int64())])
    with SqlJob(database.sink(table="ledger", evolve=True), schema=schema) as job:
        job.check()
        prepared = job.prepare(1, pa.record_batch([[7]], schema=schema))
        assert job.committer().commit(prepared) == Committed()
    assert database.query("SELECT other, id FROM ledger") == [(None, 7)]


def test_primary_key_that_is_no_column_is_refused(database: Database) -> None:
    sink = database.sink(table="ledger", create=True, primary_key=("nr",))
    assert "primary_key names nr" in _refused(sink)


@pytest.mark.parametrize("what", ["view", "loose-table"])
def test_what_would_not_keep_rows_is_refused(
    database: Database, dialect: _Dialect, what: str
) -> None:
    view = ("CREATE VIEW ledger AS SELECT 1 AS id", "is a view")
    loose = (dialect.loose_table, dialect.said_of_loose)
    statement, said = {"view": view, "loose-table": loose}[what]
    database.query(statement)
    assert said in _refused(database.sink(table="ledger"))


# -- whose the sink is -----------------------------------------------------------------------------


def test_other_job_is_refused_and_told_how_to_take_over(database: Database) -> None:
    sink = database.sink(table="ledger", create=True)
    with SqlJob(sink) as job, SqlJob(sink, log_id="log-2") as other:
        job.check(attempt=5)
        with pytest.raises(errors.ConfigError, match=r"'log-1'.*'log-2'") as failure:
            other.check(attempt=9)
        statements = str(failure.value).rpartition(": ")[2].split("; ")
        assert len(statements) == 2, "the proofs, and then the claim"
        database.query(*statements)
        other.check(attempt=1)
        with pytest.raises(errors.ConfigError):
            job.check(attempt=6)


def test_attempts_only_go_up(database: Database) -> None:
    with database.job(table="ledger", create=True) as job:
        job.check(attempt=3)
        for attempt in (1, 2, 3):
            with pytest.raises(errors.Fenced, match=f"attempt {attempt} may not write"):
                job.check(attempt=attempt)
        job.check(attempt=4)


def test_attempts_that_check_at_once_leave_the_newest_in_charge(database: Database) -> None:
    """Nothing exists yet, so they also create everything at once."""
    sink = database.sink(table="ledger", create=True)

    def check(number: int) -> None:
        with SqlJob(sink) as job, contextlib.suppress(errors.Fenced):
            job.check(number + 1)

    assert _at_once(check, 8) == []
    assert database.query(f"SELECT attempt FROM {database.fence}") == [(8,)]


def test_two_jobs_that_claim_one_sink_at_once_are_not_both_admitted(
    database: Database, dialect: _Dialect
) -> None:
    sink = database.sink(table="ledger", create=True)
    with SqlJob(sink, sink_id="other") as other:
        other.check()
    for number in range(dialect.rounds):
        admitted: list[str] = []

        def check(one: int, number: int = number) -> None:
            job = SqlJob(sink, sink_id=f"sink{number}", log_id=f"log-{one}")
            with job, contextlib.suppress(errors.ConfigError):
                job.check()
                admitted.append(job.log_id)

        assert _at_once(check, 6) == []
        assert len(admitted) == 1
        claimed = f"SELECT log_id FROM {database.fence} WHERE sink_id = 'sink{number}'"
        assert database.query(claimed) == [(admitted[0],)]


def test_different_sinks_that_start_at_once_share_the_ledger(database: Database) -> None:
    def run(number: int) -> None:
        sink = database.sink(table=f"t{number}", create=True)
        with SqlJob(sink, sink_id=f"sink{number}") as job:
            job.check().committer().commit(job.prepare(1, [number]))

    assert _at_once(run, 6) == []
    assert database.ledger_rows() == [f"sink{number}/1/1/0/0" for number in range(6)]


def _at_once(run: Callable[[int], None], count: int) -> list[BaseException]:
    """Return what failed of `run` with each number below `count`, all at the same moment."""
    barrier = threading.Barrier(count)
    failures: list[BaseException] = []

    def begin(number: int) -> None:
        barrier.wait(60)
        try:
            run(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return failures


def test_ledger_may_be_in_a_schema_of_choice(database: Database) -> None:
    """Where the tables are, or in one that is not there yet."""
    with database.new_schema("books") as books:
        for schema, others in ((books, []), (database.schema, ["onceflow_ledger"])):
            table = f"of_{schema}"
            with database.job(table=table, create=True, ledger_schema=schema) as job:
                committable = job.check().prepare(1, [1])
                assert job.committer().commit(committable) == Committed()
            found = database.query(f"SELECT transaction_id FROM {schema}.onceflow_ledger")
            assert found == [(str(committable.transaction),)]
            assert [table for table in database.tables() if table == "onceflow_ledger"] == others
