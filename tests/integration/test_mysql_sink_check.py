"""What the MySQL sink refuses before a job writes anything, and what the refusal says to do."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

import pyarrow as pa
import pytest
from tests.integration.mysql_sink_kit import FLAVORS, Job, ids_in, query, sessions
from tests.integration.sink_kit import eventually

from onceflow.core.errors import ConfigError, Fenced, OnceflowError, SinkError
from onceflow.core.protocol.committables import Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import MySQLSink

PASSWORD = "hunter2-Correct-horse"


@pytest.fixture(params=FLAVORS)
def url(request: pytest.FixtureRequest) -> str:
    """URL of a new database, of both servers in turn."""
    found: str = request.getfixturevalue(f"{request.param}_database")
    return found


@contextmanager
def user_of(url: str, *grants: str) -> Generator[str, None, None]:
    """The URL for a new user with a password and no privileges but `grants`."""
    parts = urlsplit(url)
    name = f"u{parts.path[-12:]}"
    query(url, f"CREATE USER {name} IDENTIFIED BY '{PASSWORD}'")
    try:
        for grant in grants:
            query(url, f"GRANT {grant} TO {name}")
        yield urlunsplit(parts._replace(netloc=f"{name}:{PASSWORD}@{parts.hostname}:{parts.port}"))
    finally:
        query(url, f"DROP USER {name}")


@contextmanager
def _dropped(url: str, database: str) -> Generator[None, None, None]:
    try:
        yield
    finally:
        query(url, f"DROP DATABASE IF EXISTS {database}")


def _refused(sink: MySQLSink, kind: type[OnceflowError] = ConfigError, *, attempt: int = 1) -> str:
    with Job(sink) as job, pytest.raises(kind) as failure:
        job.check(attempt)
    assert type(failure.value) is kind
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)
    return str(failure.value)


def test_refused_login_names_where_and_whom_and_never_the_password(url: str) -> None:
    place = urlsplit(url)
    with user_of(url) as known:
        user = str(urlsplit(known).username)
        for login, database, expected in (
            (f"{user}:{PASSWORD}-not", place.path[1:], "Access denied"),
            (user, place.path[1:], "Access denied"),
            (f"nobody-knows:{PASSWORD}", place.path[1:], "Access denied"),
            (f"{user}:{PASSWORD}", "mysql", "Access denied"),
            ("root:onceflow", "nowhere", "Unknown database 'nowhere'"),
        ):
            target = f"mysql://{login}@{place.hostname}:{place.port}/{database}"
            text = _refused(MySQLSink(target, table="ledger"))
            assert expected in text
            for part in (login.partition(":")[0], database, str(place.port)):
                assert part in text
            assert PASSWORD not in text


def test_right_password_is_never_seen(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    query(url, "CREATE TABLE hidden (id bigint, account text)")
    with user_of(url, f"ALL ON {urlsplit(url).path[1:]}.*") as known:
        place = urlsplit(known)
        where = f"{place.hostname}:{place.port}{place.path}"
        seen: list[str] = []
        for sink in (
            MySQLSink(known, table="hidden"),
            MySQLSink(known.replace("mysql://", "mysql+pymysql://"), table="hidden"),
            MySQLSink(
                f"jdbc:mysql://{where}?user={place.username}&password={PASSWORD}", table="hidden"
            ),
            MySQLSink(f"mysql://{place.username}@{where}", table="hidden", password=PASSWORD),
        ):
            seen += [repr(sink), repr(sink.settings)]
            with Job(MySQLSink(known, table="hidden", delivery="at_least_once")) as job:
                seen.append(repr(vars(job.committer())))
            with Job(sink) as job, pytest.raises(ConfigError) as failure:
                job.writer()
            assert "no column 'amount'" in str(failure.value), "the password opened the door"
            seen.append(repr(failure.value))
    assert PASSWORD not in "".join(seen)
    assert PASSWORD not in caplog.text


def test_unknown_host_and_closed_port_are_told_apart() -> None:
    text = _refused(MySQLSink("mysql://u:p@no-such-host.invalid/db", table="t"))
    assert "no-such-host.invalid" in text
    # A server that is not running may be back soon: that is no wrong setting.
    text = _refused(MySQLSink("mysql://u:p@127.0.0.1:1/db", table="t"), SinkError)
    assert "127.0.0.1:1" in text
    assert "refused" in text


def test_what_a_user_may_not_is_told_with_the_grant_until_nothing_is_missing(url: str) -> None:
    """An operator who runs whatever the error says arrives at a job that writes."""
    database = urlsplit(url).path[1:]
    books = f"{database}_books"
    query(url, "CREATE TABLE ledger (id bigint PRIMARY KEY, account text, amount bigint)")
    with user_of(url, f"SELECT ON {database}.*") as limited, _dropped(url, books):
        sink = MySQLSink(
            limited, table="ledger", write_mode="upsert", primary_key=("id",), tombstones=True,
            commit_mode="two_phase", ledger_schema=books,
        )  # fmt: skip
        told: list[str] = []
        for attempt in range(1, 10):
            with Job(sink) as job:
                try:
                    job.check(attempt)
                    committable = job.prepare(1, [1, 2], attempt=attempt)
                    assert job.committer(attempt).commit(committable) == Committed()
                    break
                except SinkError as error:
                    raise AssertionError(f"not found by the check: {error}") from error
                except ConfigError as error:
                    told.append(str(error))
            _run_what_is_said(url, told[-1])
        assert ids_in(url) == [1, 2]
    assert len(told) >= 3
    assert len(set(told)) == len(told), "each statement mended what it was said for"
    # MariaDB lets everybody list what is prepared.
    assert ("GRANT XA_RECOVER_ADMIN" in " ".join(told)) == (not _is_mariadb(url))


def _run_what_is_said(url: str, text: str) -> None:
    """Run every statement in the text of an error, up to where its sentence ends."""
    for part in text.replace("Run as its owner: ", "; ").replace("Run: ", "; ").split("; "):
        start = max(part.find("GRANT "), part.find("CREATE DATABASE"))
        if start >= 0:
            query(url, part[start:])


def _is_mariadb(url: str) -> bool:
    ((version,),) = query(url, "SELECT VERSION()")
    return "MariaDB" in str(version)


@pytest.mark.parametrize("write_mode", ["upsert", "ignore", "update"])
def test_privileges_on_the_columns_of_the_stream_are_enough(
    url: str, write_mode: Literal["upsert", "ignore", "update"]
) -> None:
    database = urlsplit(url).path[1:]
    query(url, "CREATE TABLE ledger (id bigint PRIMARY KEY, account text, amount bigint, no text)")
    with user_of(url, f"ALL ON {database}_books.*") as limited, _dropped(url, f"{database}_books"):
        user = urlsplit(limited).username
        columns = "(id, account, amount)"
        query(url, f"CREATE DATABASE {database}_books")
        query(url, f"GRANT INSERT {columns}, SELECT {columns} ON {database}.ledger TO {user}")
        sink = MySQLSink(
            limited, table="ledger", write_mode=write_mode, primary_key=("id",),
            ledger_schema=f"{database}_books", commit_mode="ledger",
        )  # fmt: skip
        with TemporaryDirectory() as directory:
            staging = FileStagingArea.in_directory(directory, "job.ledger")
            with Job(sink, staging=staging) as job:
                with pytest.raises(ConfigError, match=f"GRANT UPDATE ON `{database}`.`ledger`"):
                    job.check()
                query(url, f"GRANT UPDATE {columns} ON {database}.ledger TO {user}")
                committer = job.check(2).committer(2)
                for checkpoint in (1, 2):
                    outcome = committer.commit(job.prepare(checkpoint, [1, 2], attempt=2))
                    assert outcome == Committed()
        assert ids_in(url) == ([] if write_mode == "update" else [1, 2])


def test_missing_table_is_answered_with_the_statement_that_creates_it(url: str) -> None:
    text = _refused(MySQLSink(url, table="ledger"))
    assert "create=True" in text
    query(url, text[text.index("CREATE TABLE") :])
    with Job(MySQLSink(url, table="ledger")) as job:
        job.check(attempt=2)
        assert job.committer(2).commit(job.prepare(1, [1], attempt=2)) == Committed()
    assert ids_in(url) == [1]


def test_table_is_created_once_and_kept(url: str) -> None:
    sink = MySQLSink(url, table="ledger", create=True, primary_key=("id",))
    with Job(sink) as job:
        job.check().committer().commit(job.prepare(1, [1]))
        job.check(attempt=2)
    assert ids_in(url) == [1]
    keys = query(url, "SHOW KEYS FROM ledger")
    assert [(row[2], row[4]) for row in keys] == [("PRIMARY", "id")]


def test_table_is_not_created_while_the_sink_has_something_in_doubt(url: str) -> None:
    with Job(MySQLSink(url, table="old", create=True)) as job:
        job.check().prepare(1, [1])
    with Job(MySQLSink(url, table="new", create=True)) as job:
        with pytest.raises(ConfigError, match=r"in doubt.*job\.ledger/1/1/0/0"):
            job.check(attempt=2)
        assert query(url, "SHOW TABLES LIKE 'new'") == []
        (orphan,) = job.committer().in_doubt()
        job.committer().commit(orphan)
        job.check(attempt=3)
        assert query(url, "SHOW TABLES LIKE 'new'") == [("new",)]


def test_names_keep_odd_characters_and_columns_go_by_name(url: str) -> None:
    query(
        url,
        "CREATE TABLE `Sales %s``s` (note varchar(9) DEFAULT 'none', `order` text, `Größe %` "
        'bigint, twice bigint GENERATED ALWAYS AS (`Größe %` * 2) STORED, `a"b` text)',
    )
    schema = pa.schema([("Größe %", pa.int64()), ('a"b', pa.string()), ("order", pa.string())])
    with Job(MySQLSink(url, table="Sales %s`s"), schema=schema) as job:
        writer = job.check().writer()
        writer.write(pa.record_batch([[3], ["x"], ["y"]], schema=schema))
        committable = writer.pre_commit(CheckpointId(1))
        assert committable is not None
        assert job.committer().commit(committable) == Committed()
    assert query(url, "SELECT * FROM `Sales %s``s`") == [("none", "y", 3, 6, "x")]


def test_every_column_at_fault_is_named_with_both_types(url: str) -> None:
    query(
        url,
        "CREATE TABLE ledger (id varchar(9), amount bigint GENERATED ALWAYS AS (1) STORED, "
        "must decimal(10,2) NOT NULL)",
    )
    text = _refused(MySQLSink(url, table="ledger"))
    for part in ("column 'id'", "int64", "varchar(9)", "no column 'account'", "'amount' is gener",
                 "'must' is NOT NULL without a default"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("CREATE VIEW ledger AS SELECT 1 AS id", "view"),
        ("CREATE TABLE ledger (id bigint) ENGINE = MyISAM", "ENGINE = InnoDB"),
    ],
)
def test_what_would_not_keep_rows_is_refused(url: str, statement: str, expected: str) -> None:
    query(url, statement)
    assert expected.lower() in _refused(MySQLSink(url, table="ledger")).lower()


def test_other_job_is_refused_and_told_how_to_take_over(url: str) -> None:
    sink = MySQLSink(url, table="ledger", create=True)
    with Job(sink) as job, Job(sink, log_id="log-2") as other:
        job.check(attempt=5)
        with pytest.raises(ConfigError, match=r"'log-1'.*'log-2'") as failure:
            other.check(attempt=9)
        query(url, str(failure.value).rpartition(": ")[2])
        other.check(attempt=1)
        with pytest.raises(ConfigError):
            job.check(attempt=6)


def test_attempts_only_go_up(url: str) -> None:
    with Job(MySQLSink(url, table="ledger", create=True)) as job:
        job.check(attempt=3)
        for attempt in (1, 2, 3):
            with pytest.raises(Fenced, match=f"attempt {attempt} may not write"):
                job.check(attempt=attempt)
        job.check(attempt=4)


def test_attempts_that_check_at_once_leave_the_newest_in_charge(url: str) -> None:
    """Nothing exists yet, so they also create everything at once."""
    sink = MySQLSink(url, table="ledger", create=True)

    def check(attempt: int) -> None:
        with Job(sink) as job, contextlib.suppress(Fenced):
            job.check(attempt)

    assert _at_once(check, 8) == []
    assert query(url, "SELECT attempt FROM onceflow_sinks") == [(7,)]


def test_two_jobs_that_claim_one_sink_at_once_are_not_both_admitted(url: str) -> None:
    sink = MySQLSink(url, table="ledger", create=True)
    with Job(sink, sink_id="other") as other:
        other.check()
    for number in range(5):
        admitted: list[str] = []

        def check(one: int, number: int = number) -> None:
            job = Job(sink, sink_id=f"sink{number}", log_id=f"log-{one}")
            with job, contextlib.suppress(ConfigError):
                job.check()
                admitted.append(job.log_id)

        assert _at_once(check, 6) == []
        assert len(admitted) == 1
        found = query(url, f"SELECT log_id FROM onceflow_sinks WHERE sink_id = 'sink{number}'")
        assert found == [(admitted[0],)]


def _at_once(run: Callable[[int], None], count: int) -> list[BaseException]:
    """Return what failed of `run` with each number below `count`, all at the same moment."""
    barrier = threading.Barrier(count)
    failures: list[BaseException] = []

    def begin(number: int) -> None:
        barrier.wait(10)
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


def test_ledger_may_be_in_a_database_of_choice(url: str) -> None:
    name = f"{urlsplit(url).path[1:]}_books"
    with _dropped(url, name):
        with Job(MySQLSink(url, table="ledger", create=True, ledger_schema=name)) as job:
            committable = job.check().prepare(1, [1])
            assert job.committer().commit(committable) == Committed()
        found = query(url, f"SELECT transaction_id FROM {name}.onceflow_ledger")
        assert found == [(str(committable.transaction),)]
        assert query(url, "SHOW TABLES LIKE 'onceflow%'") == []


def test_check_leaves_no_session_behind(url: str) -> None:
    with Job(MySQLSink(url, table="ledger", create=True)) as job:
        job.check()
        eventually(lambda: sessions(url) == [], timeout_s=10)
