"""The check of rows that are staged: values that only the server can read, and CHECK constraints.

One statement casts the values of up to a batch of rows to the types of their columns, and
evaluates the constraints over the cast values. It needs no privilege, writes nothing and locks
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.postgres.catalog import quote
from onceflow.clients.postgres.connection import own
from onceflow.clients.postgres.types import PostgresFit, fits_of
from onceflow.clients.sql.session import RowRefused, Session
from onceflow.clients.sql.tables import CheckConstraint, Target
from onceflow.sinks.postgres.dml import (
    array_parameters,
    cast_value,
    set_text_settings,
    split_into_statements,
    unnest_rows,
)
from onceflow.sinks.sql.dialect import RowCheck

_CUT_BY_CASTS = frozenset({"bit", "varbit"})
"""The types whose values an explicit cast cuts to the column's length; an INSERT refuses them."""
_CHECK_VIOLATION = "23514"


class PostgresRowCheck(RowCheck):
    """A check of some columns of a table."""

    def __init__(
        self, target: Target, fits: Sequence[PostgresFit], constraints: Sequence[CheckConstraint]
    ) -> None:
        """Send nothing yet."""
        self._fits = fits
        columns: list[str] = []
        casts: list[str] = []
        conditions: list[tuple[str, str]] = [
            (f"check constraint {each.name}", each.expression) for each in constraints
        ]
        for number, fit in enumerate(fits):
            value = cast_value(number, fit)
            columns.append(f"{value}::{fit.type.shown} AS {quote(fit.name)}")
            casts.append(f"count(r.{quote(fit.name)})")
            if (fit.type.element or fit.type.name) in _CUT_BY_CASTS:
                columns.append(f"{value}::text AS {quote(_uncut(number))}")
                whole = f"r.{quote(fit.name)}::text = r.{quote(_uncut(number))}"
                conditions.append((f"the length of {fit.type.shown}", whole))
        self._broken = [
            f"the row violates {rule}; table {target.name} (SQLSTATE {_CHECK_VIOLATION})"
            for rule, _ in conditions
        ]
        counts = [f"count(*) FILTER (WHERE NOT ({condition}))" for _, condition in conditions]
        # OFFSET 0 keeps the planner from evaluating a cast more than once.
        self._statement = (
            f"SELECT {', '.join(counts + casts)} FROM (SELECT {', '.join(columns)}"
            f" FROM {unnest_rows(fits)} OFFSET 0) AS r"
        )

    @override
    def __call__(self, session: Session, rows: pa.RecordBatch) -> None:
        with session.transaction():
            set_text_settings(session, self._fits)
            for part in split_into_statements(rows):
                parameters = array_parameters(self._fits, part)
                (counts,) = own(session).query_arrays(self._statement, parameters)
                for broken, count in zip(self._broken, counts, strict=False):
                    if count:
                        raise RowRefused(broken, _CHECK_VIOLATION)


def find_row_check(
    target: Target, names: Sequence[str], constraints: Sequence[CheckConstraint]
) -> PostgresRowCheck | None:
    """Return the check of the columns `names` with `constraints`, or None if none is needed."""
    written = fits_of(target, names)
    needed = {fit.name for fit in written if fit.is_read_by_server}
    needed.update(*(each.columns for each in constraints))
    fits = [fit for fit in written if fit.name in needed]
    return PostgresRowCheck(target, fits, constraints) if fits else None


def _uncut(number: int) -> str:
    # The control character keeps the name apart from those of the table's columns.
    return f"\a{number}"
