"""The queries of the judge for Postgres."""

from __future__ import annotations

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow
from typing_extensions import LiteralString

from onceflow.core.errors import ConfigError
from onceflow.integration import workload
from onceflow.integration.judges.verdict import Found, NoVerdict

_STATEMENT_TIMEOUT_S = 300

# A null id counts as a row but not as an id, so it appears in duplicates: rows - ids.
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
# IS DISTINCT FROM, because a null is also wrong, and != would not report it.
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


def count_in_postgres(url: str, table: str, payments: workload.Payments) -> Found:
    """Return the counts of `table` from one consistent snapshot.

    Raises:
        ConfigError: The table or one of its columns does not exist.
        NoVerdict: The database does not answer.
    """
    name = sql.Identifier(*table.split("."))
    try:
        with psycopg.connect(url) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            # Sorting in memory halves the time. SET LOCAL ends with the transaction.
            connection.execute("SET LOCAL work_mem = '256MB'")
            connection.execute(
                sql.SQL("SET LOCAL statement_timeout = {}").format(_STATEMENT_TIMEOUT_S * 1000)
            )
            rows, ids, expected_ids, digest = _ask(
                connection, _COUNT, name=name, records=payments.records
            )
            (wrong_balances,) = _ask(connection, _CHAINS, name=name)
            (in_doubt,) = _ask(connection, _IN_DOUBT)
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
        raise ConfigError(
            f"table {table} cannot be verified: {error.diag.message_primary}; it needs the "
            "columns id, account, amount, balance and n"
        ) from error
    except psycopg.Error as error:
        raise NoVerdict(f"Postgres did not say what table {table} holds: {error}") from error
    return Found(rows, ids, expected_ids, digest, wrong_balances, in_doubt)


def _ask(
    connection: psycopg.Connection[TupleRow],
    question: LiteralString,
    **parts: sql.Composable | int,
) -> tuple[int, ...]:
    query = sql.SQL(question).format(
        **parts,
        amount_prime=workload.DIGEST_AMOUNT_PRIME,
        amount_min=workload.AMOUNT_MIN_CENTS,
        account_prime=workload.DIGEST_ACCOUNT_PRIME,
    )
    row = connection.execute(query).fetchone()
    return tuple(int(value or 0) for value in row or ())
