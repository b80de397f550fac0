"""The oracle finds every violation that is planted, and nothing in a right table."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import psycopg
import pytest
from typing_extensions import LiteralString

from onceflow.core.errors import ConfigError
from onceflow.integration.oracle import Verdict, verify
from onceflow.integration.workload import Payments

PAYMENTS = Payments(records=5_000, accounts=40, partitions=2, seed=7)
RIGHT = Verdict(
    records=5_000,
    rows=5_000,
    duplicates=0,
    missing=0,
    unexpected=0,
    wrong_balances=0,
    altered=False,
    in_doubt=0,
)


@pytest.fixture
def ledger(postgres_database: str) -> str:
    """A database whose table `ledger` is exactly right."""
    balances: defaultdict[int, int] = defaultdict(int)
    counts: defaultdict[int, int] = defaultdict(int)
    with psycopg.connect(postgres_database, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE ledger (id bigint, account text, amount bigint, balance bigint, n bigint)"
        )
        with (
            connection.cursor() as cursor,
            cursor.copy("COPY ledger FROM STDIN") as copy,
        ):
            for chunk in PAYMENTS.chunks():
                for id_, account, amount in zip(
                    chunk.ids.tolist(), chunk.accounts.tolist(), chunk.amounts.tolist(), strict=True
                ):
                    balances[account] += amount
                    counts[account] += 1
                    copy.write_row(
                        (id_, f"acct-{account:06}", amount, balances[account], counts[account])
                    )
    return postgres_database


def _plant(url: str, statement: LiteralString) -> Verdict:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)
    return verify(url, "ledger", PAYMENTS)


def test_right_table_is_ok(ledger: str) -> None:
    verdict = verify(ledger, "ledger", PAYMENTS)
    assert verdict == RIGHT
    assert verdict.ok


def test_schema_qualified_table_is_found(ledger: str) -> None:
    assert verify(ledger, "public.ledger", PAYMENTS) == RIGHT


def test_row_written_twice_is_a_duplicate_and_breaks_its_chain_once(ledger: str) -> None:
    verdict = _plant(ledger, "INSERT INTO ledger SELECT * FROM ledger WHERE id IN (17, 18, 19)")
    assert verdict == replace(RIGHT, rows=5_003, duplicates=3, wrong_balances=3)
    assert not verdict.ok


def test_lost_row_is_missing_and_breaks_its_chain(ledger: str) -> None:
    verdict = _plant(ledger, "DELETE FROM ledger WHERE id = 17")
    assert verdict == replace(RIGHT, rows=4_999, missing=1, wrong_balances=1)
    assert not verdict.ok


def test_lost_and_doubled_rows_do_not_make_up_for_each_other(ledger: str) -> None:
    verdict = _plant(
        ledger,
        "WITH gone AS (DELETE FROM ledger WHERE id = 17) "
        "INSERT INTO ledger SELECT * FROM ledger WHERE id = 18",
    )
    assert (verdict.rows, verdict.duplicates, verdict.missing) == (5_000, 1, 1)
    assert not verdict.ok


def test_whole_account_lost_is_missing(ledger: str) -> None:
    verdict = _plant(ledger, "DELETE FROM ledger WHERE account = 'acct-000003'")
    assert verdict.missing == 5_000 - verdict.rows > 50
    assert verdict.wrong_balances == 0
    assert not verdict.ok


def test_row_that_was_never_produced_is_unexpected(ledger: str) -> None:
    verdict = _plant(ledger, "INSERT INTO ledger VALUES (5000, 'acct-999999', 1, 1, 1)")
    assert verdict == replace(RIGHT, rows=5_001, unexpected=1)
    assert not verdict.ok


def test_state_that_was_lost_at_a_restart_breaks_the_chain_once(ledger: str) -> None:
    verdict = _plant(
        ledger,
        "UPDATE ledger l SET n = n - 20, balance = balance - (SELECT b.balance FROM ledger b "
        "WHERE b.account = l.account AND b.n = 20) WHERE account = 'acct-000003' AND n > 20",
    )
    assert verdict.wrong_balances > 0
    assert not verdict.ok


@pytest.mark.parametrize(
    "column_of_row_17",
    ["balance = balance + 1", "n = n + 1000000", "balance = NULL", "n = NULL"],
)
def test_wrong_number_in_one_row_breaks_the_chain(ledger: str, column_of_row_17: str) -> None:
    with psycopg.connect(ledger, autocommit=True) as connection:
        connection.execute(f"UPDATE ledger SET {column_of_row_17} WHERE id = 17".encode())
    verdict = verify(ledger, "ledger", PAYMENTS)
    assert verdict.wrong_balances in {1, 2}
    assert (verdict.rows, verdict.duplicates, verdict.missing) == (5_000, 0, 0)
    assert not verdict.ok


def test_null_id_is_a_missing_one(ledger: str) -> None:
    verdict = _plant(ledger, "UPDATE ledger SET id = NULL WHERE id = 17")
    assert (verdict.rows, verdict.missing) == (5_000, 1)
    assert not verdict.ok


@pytest.mark.parametrize(
    "statement",
    [
        # The chains of both stay right: only the comparison with what was produced tells.
        """
        UPDATE ledger SET amount = amount + 1, balance = balance + 1
        WHERE account = 'acct-000003'
        AND n = (SELECT max(n) FROM ledger WHERE account = 'acct-000003')
        """,
        "UPDATE ledger SET account = 'acct-000777' WHERE account = 'acct-000003'",
        "UPDATE ledger SET account = 'somebody' WHERE account = 'acct-000003'",
        "UPDATE ledger SET id = 18 - (id - 17) WHERE id IN (17, 18)",
    ],
)
def test_payment_that_is_not_the_one_produced_is_altered(
    ledger: str, statement: LiteralString
) -> None:
    verdict = _plant(ledger, statement)
    assert verdict == replace(RIGHT, altered=True)
    assert not verdict.ok


def test_prepared_transaction_of_this_database_is_in_doubt(ledger: str) -> None:
    with psycopg.connect(ledger, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("INSERT INTO ledger VALUES (1, 'a', 1, 1, 1)")
        connection.execute("PREPARE TRANSACTION 'in doubt'")
    verdict = verify(ledger, "ledger", PAYMENTS)
    assert verdict == replace(RIGHT, in_doubt=1)
    assert not verdict.ok


def test_empty_table_misses_everything(ledger: str) -> None:
    verdict = _plant(ledger, "TRUNCATE ledger")
    assert verdict == replace(RIGHT, rows=0, missing=5_000)


def test_table_without_the_columns_is_refused_by_name(ledger: str) -> None:
    with pytest.raises(ConfigError, match=r"table ledger cannot.*balance"):
        _plant(ledger, "ALTER TABLE ledger DROP COLUMN balance")
    with pytest.raises(ConfigError, match="table nowhere cannot"):
        verify(ledger, "nowhere", PAYMENTS)
