"""The judge of a run: asks the target table alone, by SQL, whether every payment is there once.

The table has, for every payment, `id`, `account`, `amount`, the account's `balance` after it, and
`n`, its place in the account's own order (1, 2, 3 …). The order of one account's payments is not
fixed when they come from several partitions; whatever it was, `n` names it, so the chain can be
checked without knowing it:

    the rows of an account, by n:   n = n of the row before + 1           (0 before the first)
                                    balance = balance before + amount     (0 before the first)
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow
from typing_extensions import LiteralString

from onceflow.core.errors import ConfigError
from onceflow.integration.workload import (
    AMOUNT_MIN_CENTS,
    DIGEST_ACCOUNT_PRIME,
    DIGEST_AMOUNT_PRIME,
    Payments,
)

_STATEMENT_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the table says; `ok` when every payment is there once and nothing else is."""

    records: int
    """Payments produced."""
    rows: int
    """Rows in the table."""
    duplicates: int
    """Rows beyond the first of their id."""
    missing: int
    """Ids that were produced and have no row."""
    unexpected: int
    """Ids in the table that were never produced."""
    wrong_balances: int
    """Rows that do not continue their account's chain."""
    altered: bool
    """Every id is there once, but an account or an amount is not the one produced."""
    in_doubt: int
    """Transactions prepared in this database and neither committed nor rolled back."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.rows == self.records and not any(
            (
                self.duplicates,
                self.missing,
                self.unexpected,
                self.wrong_balances,
                self.altered,
                self.in_doubt,
            )
        )


def verify(url: str, table: str, payments: Payments) -> Verdict:
    """Return the verdict on `table` (maybe `schema.table`) after a run over `payments`.

    Reads one consistent snapshot and changes nothing. About 1.5 s a million rows.

    Raises:
        ConfigError: The table or one of its columns does not exist.
        psycopg.Error: The database does not answer.
    """
    name = sql.Identifier(*table.split("."))
    with psycopg.connect(url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        # Sorting in memory halves the time; SET LOCAL ends with the transaction.
        connection.execute("SET LOCAL work_mem = '256MB'")
        connection.execute(
            sql.SQL("SET LOCAL statement_timeout = {}").format(_STATEMENT_TIMEOUT_S * 1000)
        )
        try:
            rows, ids, expected_ids, digest = _ask(
                connection, _COUNT, name=name, records=payments.records
            )
            (wrong_balances,) = _ask(connection, _CHAINS, name=name)
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
            raise ConfigError(
                f"table {table} cannot be verified: {error.diag.message_primary}; it needs the "
                "columns id, account, amount, balance and n"
            ) from error
        (in_doubt,) = _ask(connection, _IN_DOUBT)
    complete = rows == ids == expected_ids == payments.records
    return Verdict(
        records=payments.records,
        rows=rows,
        duplicates=rows - ids,
        missing=payments.records - expected_ids,
        unexpected=ids - expected_ids,
        wrong_balances=wrong_balances,
        altered=complete and digest != payments.digest(),
        in_doubt=in_doubt,
    )


# A null id is counted as a row without an id, hence as a duplicate of nothing: rows - ids.
_COUNT: LiteralString = """
    SELECT sum(copies), count(id), count(id) FILTER (WHERE id >= 0 AND id < {records}), sum(digest)
    FROM (
        SELECT id, count(*) AS copies, sum(
            (id % {amount_prime}) * (amount - {amount_min} + 1)
            + (id % {account_prime})
            * CASE WHEN account ~ '^acct-[0-9]{{6}}$' THEN substr(account, 6)::bigint ELSE -1 END
        ) AS digest
        FROM {name} GROUP BY id
    ) AS by_id
"""
# IS DISTINCT FROM: a null is wrong too, and = would let it pass.
_CHAINS: LiteralString = """
    SELECT count(*) FROM (
        SELECT n, balance,
            lag(n, 1, 0::bigint) OVER of_account + 1 AS n_expected,
            lag(balance, 1, 0::bigint) OVER of_account + amount AS balance_expected
        FROM {name}
        WINDOW of_account AS (PARTITION BY account COLLATE "C" ORDER BY n)
    ) AS chained
    WHERE n IS DISTINCT FROM n_expected OR balance IS DISTINCT FROM balance_expected
"""
_IN_DOUBT: LiteralString = (
    "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
)


def _ask(
    connection: psycopg.Connection[TupleRow],
    question: LiteralString,
    **parts: sql.Composable | int,
) -> tuple[int, ...]:
    query = sql.SQL(question).format(
        **parts,
        amount_prime=DIGEST_AMOUNT_PRIME,
        amount_min=AMOUNT_MIN_CENTS,
        account_prime=DIGEST_ACCOUNT_PRIME,
    )
    row = connection.execute(query).fetchone()
    return tuple(int(value or 0) for value in row or ())
