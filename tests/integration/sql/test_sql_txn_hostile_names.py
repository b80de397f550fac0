"""`onceflow txn` where databases, tables and transactions have names of quotes and escape codes."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.integration.sql.databases import Database, Postgres, SqlJob
from tests.support.aged_log import AgedLog
from typer.testing import CliRunner

from onceflow.cli.main import app
from onceflow.integration.servers import postgres

pytestmark = pytest.mark.servers

SINK_ID = "payments.out"
NAME = "a`b\"c'd;%s--e\\f\ng\x1b[2Jh"
"""A name that ends every quote there is, and clears the terminal that shows it."""
DATABASE = NAME.ljust(63, "x")
TABLE = f"t{NAME}".ljust(63, "y")
HOSTILE_IDS = [
    f"{SINK_ID}/1/1/0/0{end}"
    for end in ("'", "`", '"', ";DROP DATABASE mysql", "%s", "\n", "\x1b[2J", "\\", "/0", "x" * 64)
]
FOREIGN_ID = f"{SINK_ID}/1/1/0/0' \x1b[2J\n%s`\"".ljust(64, "z")


@pytest.fixture
def log(tmp_path: Path) -> AgedLog:
    log = AgedLog(tmp_path / "checkpoints")
    log.claim()
    return log


@pytest.fixture
def hostile(database: Database) -> Iterator[Database]:
    """A database of that name."""
    database.query(f"CREATE DATABASE {database.quoted(DATABASE)}")
    url, _, _ = database.url.rpartition("/")
    hostile = type(database)(f"{url}/{quote(DATABASE, safe='')}")
    yield hostile
    hostile.query(_end_foreign(hostile))
    if isinstance(hostile, Postgres):
        postgres.roll_back_prepared(hostile.url)
    forcibly = " WITH (FORCE)" if isinstance(hostile, Postgres) else ""
    database.query(f"DROP DATABASE {database.quoted(DATABASE)}{forcibly}")


def test_hostile_names_are_settled_as_others_and_shown_without_control_characters(
    hostile: Database, log: AgedLog
) -> None:
    sink = hostile.sink(table=TABLE, create=True, commit_mode="two_phase")
    with SqlJob(sink, sink_id=SINK_ID, log_id=log.log_id) as job:
        job.check()
        decided, undecided = job.prepare(1, range(3)), job.prepare(2, range(3, 5))
    log.decide(1, [decided])
    _prepare_foreign(hostile)
    options = ["--url", hostile.url, "--storage", str(log.root)]
    status, text = _run("list", *options)
    assert status == 0, text
    assert [str(one.transaction) in text for one in (decided, undecided)] == [True, True]
    assert "zzz" not in text, "the transaction of another program is not shown"
    for command in ("show", "commit", "abort"):
        forced = ["--yes", "--force"] if command != "show" else []
        for transaction in (*HOSTILE_IDS, FOREIGN_ID):
            status, text = _run(command, *options, *forced, "--", transaction)
            assert status == 2, (transaction, text)
    assert _run("commit", *options, "--yes", str(decided.transaction))[0] == 0
    assert _run("abort", *options, "--yes", str(undecided.transaction))[0] == 0
    assert "nothing" in _run("list", *options)[1].lower()
    assert hostile.ids_in(hostile.quoted(TABLE)) == [0, 1, 2]
    assert _is_foreign_prepared(hostile)


def _run(command: str, *arguments: str) -> tuple[int, str]:
    """Return exit status and output, in which no character but the line break is a control."""
    outcome = CliRunner().invoke(app, ["txn", command, *arguments])
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    controls = {one for one in outcome.output if unicodedata.category(one) == "Cc"}
    assert controls <= {"\n"}, outcome.output
    return outcome.exit_code, outcome.output


def _xid() -> str:
    return f"X'{FOREIGN_ID.encode().hex()}',X'',7"


def _gid() -> str:
    escaped = FOREIGN_ID.replace("'", "''")
    return f"'{escaped}'"


def _prepare_foreign(database: Database) -> None:
    """Prepare a transaction as another program does that shares the server."""
    database.query("CREATE TABLE other (id int)")
    insert = "INSERT INTO other VALUES (1)"
    if isinstance(database, Postgres):
        database.query(f"BEGIN; {insert}; PREPARE TRANSACTION {_gid()}")
    else:
        database.query(f"XA START {_xid()}", insert, f"XA END {_xid()}", f"XA PREPARE {_xid()}")


def _end_foreign(database: Database) -> str:
    if isinstance(database, Postgres):
        return f"ROLLBACK PREPARED {_gid()}"
    return f"XA ROLLBACK {_xid()}"


def _is_foreign_prepared(database: Database) -> bool:
    if isinstance(database, Postgres):
        return (FOREIGN_ID,) in database.query("SELECT gid FROM pg_prepared_xacts")
    listed = database.query("XA RECOVER")
    texts = [row[3].decode() if isinstance(row[3], bytes) else str(row[3]) for row in listed]
    return FOREIGN_ID in texts
