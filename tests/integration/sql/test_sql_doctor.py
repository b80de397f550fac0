"""`onceflow doctor` against real databases: set up right, and refused by them."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest
from tests.integration.doctor_kit import examine, worst
from tests.integration.sql.databases import SECRETS, Database


@dataclass(frozen=True)
class _Dialect:
    """The expected texts for one kind of database."""

    said_when_right: tuple[str, ...]
    owners_affairs: tuple[str, ...]
    """What a server as installed is warned of: how it flushes, and who else uses it."""
    said_of_wrong_password: str
    remedy_of_wrong_password: str
    """For `{user}`."""
    owned: str
    """What ends the statement that creates a database."""
    loose_table: str
    """Creates the table `payments` so that it would not keep rows."""
    said_of_loose: str


_MYSQL = _Dialect(
    said_when_right=(
        "XA transactions can be prepared", "may keep the ledger", "may insert",
        "clock agrees", "connections are free",
    ),
    owners_affairs=(
        "innodb_flush_log", "sync_binlog", "local_infile", "of others", "connections",
    ),
    said_of_wrong_password="Access denied",
    remedy_of_wrong_password="ALTER USER '{user}'@'%'",
    owned="",
    loose_table="CREATE TABLE payments (id bigint) ENGINE = MyISAM",
    said_of_loose="uses the engine MyISAM",
)  # fmt: skip
_DIALECTS = {
    "postgres": _Dialect(
        said_when_right=(
            "PostgreSQL", "max_prepared_transactions = 64", "connection is direct", "clock agrees",
            "may insert", "nothing is left prepared", "connections are free",
        ),
        owners_affairs=(),
        said_of_wrong_password="password authentication failed",
        remedy_of_wrong_password='ALTER ROLE "{user}" PASSWORD',
        owned=' OWNER "postgres"',
            loose_table="CREATE UNLOGGED TABLE payments (id bigint)",
        said_of_loose="it is unlogged",
    ),
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
}  # fmt: skip


@pytest.fixture
def dialect(kind: type[Database]) -> _Dialect:
    return _DIALECTS[kind.name]


def test_a_database_that_is_set_up_right_has_nothing_to_fix(
    database: Database, dialect: _Dialect
) -> None:
    database.query("CREATE TABLE payments (id bigint PRIMARY KEY)")
    status, findings = examine("--url", database.url, "--table", "payments")
    to_fix = [
        one
        for one in worst(findings)
        if not any(word in one["found"] for word in dialect.owners_affairs)
    ]
    assert (status, to_fix) == (0, [])
    said = " ".join(finding["found"] for finding in findings)
    for part in dialect.said_when_right:
        assert part in said
    # It has looked, and created nothing.
    assert database.tables() == ["payments"]
    ours = "SELECT 1 FROM information_schema.schemata WHERE schema_name = 'onceflow'"
    assert database.query(ours) == []


def test_a_wrong_password_and_a_closed_port_are_told_apart(
    guarded: Database, dialect: _Dialect
) -> None:
    with guarded.user() as known:
        user = str(urlsplit(known.url).username)
        wrong = known.by_login(f"{user}:not-{SECRETS[1]}").url
        closed = f"{known.scheme}://u:{SECRETS[1]}@127.0.0.1:1/db"
        password = dialect.remedy_of_wrong_password.format(user=user)
        for url, said, remedy in (
            (wrong, dialect.said_of_wrong_password, password),
            (closed, "Connection refused", "start it"),
        ):
            status, findings = examine("--url", url, "--timeout", "10")
            (finding,) = worst(findings)
            assert (status, finding["level"], said in finding["found"]) == (1, "problem", True)
            assert remedy in finding["remedy"]
    owner = urlsplit(guarded.url).netloc.rpartition("@")[0]
    nowhere = guarded.by_login(owner, "nowhere")
    (finding,) = worst(examine("--url", nowhere.url)[1])
    create = f"CREATE DATABASE {guarded.quoted('nowhere')}{dialect.owned}"
    assert finding["remedy"].endswith(create)


def test_a_table_that_would_not_keep_rows_is_a_problem_and_the_statement_fixes_it(
    database: Database, dialect: _Dialect
) -> None:
    database.query(dialect.loose_table)
    status, findings = examine("--url", database.url, "--table", "payments")
    (finding,) = [finding for finding in findings if finding["area"] == "table payments"]
    assert status == 1
    assert dialect.said_of_loose in finding["found"]
    database.query(finding["remedy"])
    assert examine("--url", database.url, "--table", "payments")[0] == 0
