"""The check of rows that are staged: texts that only the server can judge, and CHECK constraints.

A text may have characters outside the charset of its column, and MariaDB keeps JSON as text with
the constraint `json_valid`. One statement asks for a batch of rows; it writes and locks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.mysql.catalog import CHARSET, TEXTS, MySQLType, quote
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
        renamed = ", ".join(
            f"{_cast(f'c{number}', fit)} AS {quote(fit.name)}"
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
    written = {fit.name: fit for fit in fits_of(target, names)}
    known = [
        each
        for each in constraints
        if each.columns and all(_can_evaluate(written[column]) for column in each.columns)
    ]
    constrained = frozenset[str]().union(*(each.columns for each in known))
    fits = [fit for fit in written.values() if _has_other_charset(fit) or fit.name in constrained]
    return MySQLRowCheck(target, fits, known) if fits else None


def _cast(value: str, fit: MySQLFit) -> str:
    """Return `value` in the type of the column, or a text as a text of `CHARSET`."""
    kind = fit.type
    if kind.name in TEXTS:
        # A column of nulls alone would have the charset binary.
        text = f"CONVERT({value} USING {CHARSET})"
        return f"{text} COLLATE {kind.collation}" if kind.charset == CHARSET else text
    return f"CAST({value} AS {_list_casts(kind)[kind.name]})"


def _can_evaluate(fit: MySQLFit) -> bool:
    """Return True if `_cast` returns exactly the value that a CHECK constraint sees."""
    kind = fit.type
    # The collation of another charset may compare texts in another way.
    return kind.charset == CHARSET if kind.name in TEXTS else kind.name in _list_casts(kind)


def _list_casts(kind: MySQLType) -> Mapping[str, str]:
    whole = "UNSIGNED" if kind.unsigned else "SIGNED"
    return {
        **dict.fromkeys(("tinyint", "smallint", "mediumint", "int", "bigint"), whole),
        **dict.fromkeys(("datetime", "timestamp"), f"DATETIME({kind.fraction_digits})"),
        "decimal": f"DECIMAL({kind.precision}, {kind.scale})",
        "double": "DOUBLE",
        "date": "DATE",
        "time": f"TIME({kind.fraction_digits})",
    }


def _has_other_charset(fit: MySQLFit) -> bool:
    """Return True if the fit does not know which characters the column accepts."""
    return fit.type.name in TEXTS and fit.type.charset not in CHECKED_CHARSETS
