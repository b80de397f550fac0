"""The queries of the judge for MySQL and MariaDB, in SQL that both understand.

Text is always compared as bytes, because the usual collations ignore case.
"""

from __future__ import annotations

import pymysql

from onceflow.core.errors import ConfigError
from onceflow.integration import workload
from onceflow.integration.judges.verdict import Found, NoVerdict
from onceflow.integration.servers.mysql import MySQLAdmin

_ANSWER_TIMEOUT_S = 300.0
_NO_SUCH_TABLE = 1146
_NO_SUCH_COLUMN = 1054

# Sorting and grouping in memory halves the time. Both settings end with the session.
_IN_MEMORY = (
    "SET SESSION sort_buffer_size = 268435456, tmp_table_size = 1073741824, "
    "max_heap_table_size = 1073741824"
)
# An account is valid if formatting its number gives the same bytes. (A regular expression would
# accept a line break at the end, and takes longer.)
_NUMBER = "CAST(SUBSTR(account, 6) AS UNSIGNED)"
_COUNT = """
    SELECT SUM(copies), COUNT(id), COUNT(CASE WHEN id >= 0 AND id < {records} THEN 1 END),
        SUM(digest)
    FROM (
        SELECT id, COUNT(*) AS copies, SUM(
            (id % {amount_prime}) * (amount - ({amount_min}) + 1)
            + (id % {account_prime})
            * CASE WHEN CAST(account AS BINARY)
                = CAST(CONCAT('acct-', LPAD({number}, 6, '0')) AS BINARY)
            THEN CAST({number} AS SIGNED) ELSE -1 END
        ) AS digest
        FROM {name} GROUP BY id
    ) AS by_id
"""
# LAG has no default value in MariaDB. <=> is true for two nulls and false for one. Nulls sort last,
# as in Postgres.
_CHAINS = """
    SELECT COUNT(*) FROM (
        SELECT n, balance,
            IF(ROW_NUMBER() OVER of_account = 1, 0, LAG(n) OVER of_account) + 1 AS n_expected,
            IF(ROW_NUMBER() OVER of_account = 1, 0, LAG(balance) OVER of_account) + amount
                AS balance_expected
        FROM {name}
        WINDOW of_account AS (PARTITION BY CAST(account AS BINARY) ORDER BY n IS NULL, n)
    ) AS chained
    WHERE NOT (n <=> n_expected) OR NOT (balance <=> balance_expected)
"""


def count_in_mysql(url: str, table: str, payments: workload.Payments) -> Found:
    """Return the counts of `table` from one consistent snapshot.

    Transactions in doubt are those of the whole server, which does not report their database.

    Raises:
        ConfigError: The table or one of its columns does not exist.
        NoVerdict: The server does not answer.
    """
    name = ".".join(f"`{part.replace('`', '``')}`" for part in table.split("."))
    try:
        with MySQLAdmin.session(url, timeout_s=_ANSWER_TIMEOUT_S) as session:
            session.rows(_IN_MEMORY)
            session.rows("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            session.rows("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
            rows, ids, expected_ids, digest = _ask(session, _COUNT, name, payments.records)
            (wrong_balances,) = _ask(session, _CHAINS, name, payments.records)
            session.rows("COMMIT")
            in_doubt = len(session.in_doubt())
    except pymysql.err.MySQLError as error:
        if error.args[0] in {_NO_SUCH_TABLE, _NO_SUCH_COLUMN}:
            raise ConfigError(
                f"table {table} cannot be verified: {error.args[1]}; it needs the columns id, "
                "account, amount, balance and n"
            ) from error
        raise NoVerdict(f"the server did not say what table {table} holds: {error}") from error
    return Found(rows, ids, expected_ids, digest, wrong_balances, in_doubt)


def _ask(session: MySQLAdmin, question: str, name: str, records: int) -> tuple[int, ...]:
    query = question.format(
        name=name,
        records=records,
        number=_NUMBER,
        amount_prime=workload.DIGEST_AMOUNT_PRIME,
        amount_min=workload.AMOUNT_MIN_CENTS,
        account_prime=workload.DIGEST_ACCOUNT_PRIME,
    )
    return tuple(int(value or 0) for value in session.rows(query)[0])
