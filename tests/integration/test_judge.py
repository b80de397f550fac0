"""The judge finds every violation that is planted in a table, and nothing in a right one."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import psycopg
import pytest

from onceflow.core.errors import ConfigError
from onceflow.integration.judge import NoVerdict, Verdict, verify
from onceflow.integration.servers import EmbeddedMariaDB, EmbeddedMySQL, EmbeddedPostgres
from onceflow.integration.servers.mysql import MySQLAdmin
from onceflow.integration.workload import Payments

PAYMENTS = Payments(records=1_000, accounts=8, partitions=2, seed=7)
RIGHT = Verdict(
    records=1_000,
    rows=1_000,
    duplicates=0,
    missing=0,
    unexpected=0,
    wrong_balances=0,
    altered=False,
    in_doubt=0,
)
_INSERT_ROWS = 1_000


@dataclass(frozen=True)
class Ledger(ABC):
    """A database whose table `ledger` is exactly right, until it is tampered with."""

    url: str

    @abstractmethod
    def rows(self, *statements: str) -> list[tuple[object, ...]]:
        """Run statements, each committed; return what the last one answers."""

    @abstractmethod
    def prepare(self) -> None:
        """Leave a prepared transaction with a row of its own."""

    def judged_after(self, *statements: str) -> Verdict:
        self.rows(*statements)
        return verify(self.url, "ledger", PAYMENTS)

    def number(self, question: str) -> int:
        return int(str(self.rows(question)[0][0]))


class PostgresLedger(Ledger):
    def rows(self, *statements: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def prepare(self) -> None:
        self.rows(
            "BEGIN",
            "INSERT INTO ledger VALUES (1, 'a', 1, 1, 1)",
            "PREPARE TRANSACTION 'in doubt'",
        )


class MySQLLedger(Ledger):
    def rows(self, *statements: str) -> list[tuple[object, ...]]:
        with MySQLAdmin.session(self.url) as session:
            return [session.rows(statement) for statement in statements][-1]

    def prepare(self) -> None:
        xid = f"'{uuid.uuid4().hex}'"
        self.rows(
            f"XA START {xid}",
            "INSERT INTO ledger VALUES (1, 'a', 1, 1, 1)",
            f"XA END {xid}",
            f"XA PREPARE {xid}",
        )


@pytest.fixture(params=["postgres", "mysql", "mariadb"])
def ledger(request: pytest.FixtureRequest) -> Ledger:
    kind = request.param
    url = str(request.getfixturevalue(f"{kind}_database"))
    ledger = PostgresLedger(url) if kind == "postgres" else MySQLLedger(url)
    ledger.rows(
        "CREATE TABLE ledger "
        "(id bigint, account varchar(255), amount bigint, balance bigint, n bigint)",
        *_inserts(),
    )
    return ledger


def _inserts() -> Iterator[str]:
    balances: defaultdict[int, int] = defaultdict(int)
    counts: defaultdict[int, int] = defaultdict(int)
    values: list[str] = []
    for chunk in PAYMENTS.chunks():
        for id_, account, amount in zip(
            chunk.ids.tolist(), chunk.accounts.tolist(), chunk.amounts.tolist(), strict=True
        ):
            balances[account] += amount
            counts[account] += 1
            values.append(
                f"({id_}, 'acct-{account:06}', {amount}, {balances[account]}, {counts[account]})"
            )
    for start in range(0, len(values), _INSERT_ROWS):
        yield f"INSERT INTO ledger VALUES {', '.join(values[start : start + _INSERT_ROWS])}"


def test_right_table_is_ok(ledger: Ledger) -> None:
    verdict = verify(ledger.url, "ledger", PAYMENTS)
    assert verdict == RIGHT
    assert verdict.ok


def test_table_is_found_in_the_schema_that_its_name_says(ledger: Ledger) -> None:
    schema = "public" if isinstance(ledger, PostgresLedger) else ledger.url.rpartition("/")[2]
    assert verify(ledger.url, f"{schema}.ledger", PAYMENTS) == RIGHT


def test_row_written_twice_is_a_duplicate_and_breaks_its_chain_once(ledger: Ledger) -> None:
    verdict = ledger.judged_after(
        "INSERT INTO ledger SELECT * FROM ledger WHERE id IN (17, 18, 19)"
    )
    assert verdict == replace(RIGHT, rows=1_003, duplicates=3, wrong_balances=3)
    assert not verdict.ok


def test_lost_row_is_missing_and_breaks_its_chain(ledger: Ledger) -> None:
    verdict = ledger.judged_after("DELETE FROM ledger WHERE id = 17")
    assert verdict == replace(RIGHT, rows=999, missing=1, wrong_balances=1)
    assert not verdict.ok


def test_lost_and_doubled_rows_do_not_make_up_for_each_other(ledger: Ledger) -> None:
    verdict = ledger.judged_after(
        "DELETE FROM ledger WHERE id = 17",
        "INSERT INTO ledger SELECT * FROM ledger WHERE id = 18",
    )
    assert (verdict.rows, verdict.duplicates, verdict.missing) == (1_000, 1, 1)
    assert not verdict.ok


def test_whole_account_lost_is_missing(ledger: Ledger) -> None:
    verdict = ledger.judged_after("DELETE FROM ledger WHERE account = 'acct-000003'")
    assert verdict.missing == 1_000 - verdict.rows > 50
    assert verdict.wrong_balances == 0
    assert not verdict.ok


def test_row_that_was_never_produced_is_unexpected(ledger: Ledger) -> None:
    verdict = ledger.judged_after("INSERT INTO ledger VALUES (1000, 'acct-999999', 1, 1, 1)")
    assert verdict == replace(RIGHT, rows=1_001, unexpected=1)
    assert not verdict.ok


def test_state_that_was_lost_at_a_restart_breaks_the_chain(ledger: Ledger) -> None:
    lost = ledger.number(
        "SELECT balance FROM ledger WHERE account = 'acct-000003' AND n = 20",
    )
    verdict = ledger.judged_after(
        f"UPDATE ledger SET n = n - 20, balance = balance - ({lost}) "
        "WHERE account = 'acct-000003' AND n > 20"
    )
    assert verdict.wrong_balances > 0
    assert not verdict.ok


@pytest.mark.parametrize(
    "column_of_row_17",
    ["balance = balance + 1", "n = n + 1000000", "balance = NULL", "n = NULL"],
)
def test_wrong_number_in_one_row_breaks_the_chain(ledger: Ledger, column_of_row_17: str) -> None:
    verdict = ledger.judged_after(f"UPDATE ledger SET {column_of_row_17} WHERE id = 17")
    assert verdict.wrong_balances in {1, 2}
    assert (verdict.rows, verdict.duplicates, verdict.missing) == (1_000, 0, 0)
    assert not verdict.ok


def test_null_id_is_a_missing_one(ledger: Ledger) -> None:
    verdict = ledger.judged_after("UPDATE ledger SET id = NULL WHERE id = 17")
    assert (verdict.rows, verdict.missing) == (1_000, 1)
    assert not verdict.ok


@pytest.mark.parametrize(
    "account",
    # Some collations call the last three the same as the one that was produced.
    ["acct-000777", "somebody", "acct-0000003", "ACCT-000003", "acct-000003 ", "acct-000003\n"],
)
def test_account_that_is_not_the_one_produced_is_altered(ledger: Ledger, account: str) -> None:
    """The chain stays right: only the comparison with what was produced tells."""
    statement = f"UPDATE ledger SET account = '{account}' WHERE account = 'acct-000003'"
    assert ledger.judged_after(statement) == replace(RIGHT, altered=True)


def test_accounts_that_a_collation_takes_for_one_have_a_chain_each(ledger: Ledger) -> None:
    verdict = ledger.judged_after(
        "UPDATE ledger SET account = 'ACCT-000003' WHERE account = 'acct-000003' AND n > 20"
    )
    assert verdict == replace(RIGHT, wrong_balances=1, altered=True)


def test_amount_that_is_not_the_one_produced_is_altered(ledger: Ledger) -> None:
    last = ledger.number("SELECT max(n) FROM ledger WHERE account = 'acct-000003'")
    verdict = ledger.judged_after(
        "UPDATE ledger SET amount = amount + 1, balance = balance + 1 "
        f"WHERE account = 'acct-000003' AND n = {last}"
    )
    assert verdict == replace(RIGHT, altered=True)
    assert not verdict.ok


def test_payments_that_have_changed_places_are_altered(ledger: Ledger) -> None:
    verdict = ledger.judged_after("UPDATE ledger SET id = 18 - (id - 17) WHERE id IN (17, 18)")
    assert verdict == replace(RIGHT, altered=True)
    assert not verdict.ok


def test_prepared_transaction_is_in_doubt(ledger: Ledger) -> None:
    ledger.prepare()
    verdict = verify(ledger.url, "ledger", PAYMENTS)
    assert verdict == replace(RIGHT, in_doubt=1)
    assert not verdict.ok


def test_empty_table_misses_everything(ledger: Ledger) -> None:
    assert ledger.judged_after("TRUNCATE TABLE ledger") == replace(RIGHT, rows=0, missing=1_000)


def test_table_without_the_columns_is_refused_by_name(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match=r"table ledger cannot.*balance"):
        ledger.judged_after("ALTER TABLE ledger DROP COLUMN balance")
    with pytest.raises(ConfigError, match="table nowhere cannot"):
        verify(ledger.url, "nowhere", PAYMENTS)


def test_database_of_a_kind_without_a_judge_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match="scheme 'oracle'") as refused:
        verify("oracle://user:hush@localhost/x", "ledger", PAYMENTS)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("kind", [EmbeddedPostgres, EmbeddedMySQL, EmbeddedMariaDB])
def test_server_that_is_down_gives_no_verdict(
    kind: type[EmbeddedPostgres | EmbeddedMySQL | EmbeddedMariaDB],
) -> None:
    server = kind()
    try:
        with pytest.raises(NoVerdict, match="table ledger"):
            verify(server.url, "ledger", PAYMENTS)
    finally:
        server.stop()
