"""The check of rows that are staged: texts that only the server can judge.

A text may have characters outside the charset of its column, and MariaDB keeps JSON as text with
the constraint `json_valid`. One statement asks for a batch of rows; it writes and locks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.mysql.catalog import CHARSET, TEXTS, quote
from onceflow.clients.mysql.connection import own, to_sql_error
from onceflow.clients.mysql.types import CHECKED_CHARSETS, MySQLFit, fits_of
from onceflow.clients.sql.session import Session
from onceflow.clients.sql.tables import CheckConstraint, Target
from onceflow.sinks.mysql.dml import RowsStatement, spell, statement_sized
from onceflow.sinks.sql.dialect import RowCheck

_INCORRECT_STRING, _CONSTRAINT_FAILED = 1366, 4025


class MySQLRowCheck(RowCheck):
    """A check of some columns of a table."""

    def __init__(
        self, target: Target, fits: Sequence[MySQLFit], constraints: Sequence[CheckConstraint]
    ) -> None:
        """Send nothing yet."""
        self._fits = fits
        self._broken: list[tuple[int, str]] = []
        conditions: list[str] = []
        for fit in fits:
            name, charset = quote(fit.name), fit.type.charset
            if _has_other_charset(fit):
                kept = f"CONVERT(CONVERT({name} USING {charset}) USING {CHARSET})"
                conditions.append(f"{kept} = {name} COLLATE {CHARSET}_bin")
                why = f"column {fit.name!r}: a character is outside the column's charset {charset}"
                self._broken.append((_INCORRECT_STRING, why))
        for each in constraints:
            self._broken.append(
                (_CONSTRAINT_FAILED, f"{target.name}: the row violates CONSTRAINT `{each.name}`")
            )
            conditions.append(each.expression)
        self._counts = ", ".join(f"COUNT(CASE WHEN NOT ({each}) THEN 1 END)" for each in conditions)

    @override
    def __call__(self, session: Session, rows: pa.RecordBatch) -> None:
        connection = own(session)
        names = ", ".join(f"c{number}" for number in range(len(self._fits)))
        # A column of nulls alone would have the charset binary.
        renamed = ", ".join(
            f"CONVERT(c{number} USING {CHARSET}) AS {quote(fit.name)}"
            for number, fit in enumerate(self._fits)
        )
        statement = RowsStatement(
            f"SELECT {self._counts} FROM (WITH given({names}) AS (VALUES ".encode(),
            f") SELECT {renamed} FROM given) AS r".encode(),
            "" if connection.is_mariadb else "ROW",
        )
        for part in statement_sized(rows.select([fit.name for fit in self._fits])):
            for _, spelled in spell(connection, statement, self._fits, part):
                (counts,) = connection.query(spelled.decode())
                for (number, text), count in zip(self._broken, counts, strict=True):
                    if count:
                        raise to_sql_error(number, text)


def find_row_check(
    target: Target, names: Sequence[str], constraints: Sequence[CheckConstraint]
) -> MySQLRowCheck | None:
    """Return the check of the columns `names` with `constraints`, or None if none is needed."""
    constrained = frozenset[str]().union(*(each.columns for each in constraints))
    fits = [
        fit for fit in fits_of(target, names) if _has_other_charset(fit) or fit.name in constrained
    ]
    return MySQLRowCheck(target, fits, constraints) if fits else None


def _has_other_charset(fit: MySQLFit) -> bool:
    """Return True if the fit does not know which characters the column accepts."""
    return fit.type.name in TEXTS and fit.type.charset not in CHECKED_CHARSETS
