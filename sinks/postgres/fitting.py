"""Makes the columns of a batch fit a table's columns, or names the value that does not.

Only what Postgres would refuse late, round in silence or read as infinity is looked at, and whole
columns at a time: text is searched for NUL by memchr, int64 for bigint is not touched at all.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.core.errors import BadRow
from onceflow.sinks.postgres.catalog import PostgresType
from onceflow.sinks.postgres.types import Wire
from onceflow.sinks.sql.tables import TableColumn, Target
from onceflow.sinks.sql.values import decoded, fitted, is_text, refused_at

# The first day and microsecond that Postgres has, 4714-11-24 BC, and the day after its last one,
# counted from 1970. Its last microsecond is beyond Arrow's.
# Source: src/include/datatype/timestamp.h, PostgreSQL 12 to 18.
_DAY_FIRST = -2_440_588
_DAY_END = 2_145_042_906
_MICROSECOND_FIRST = -210_866_803_200_000_000
_UUID_DIGITS = "[0-9a-fA-F]{32}"
# uint64 has 20 digits; Arrow casts integers only to decimals that hold all of their type.
_ANY_INTEGER = pa.decimal128(20, 0)


@dataclass(frozen=True, slots=True)
class PostgresFit:
    """Takes one column of a batch to what the encoder wants for one column of the table."""

    column: TableColumn
    type: PostgresType
    """The column's."""
    wire: Wire

    @property
    def name(self) -> str:
        """The column's name, in the batch and in the table."""
        return self.column.name

    @property
    def shown(self) -> str:
        """The table's type as an error message shows it."""
        return self.type.shown

    @property
    def nullable(self) -> bool:
        """Whether the column takes nulls."""
        return self.column.nullable

    def apply(self, given: pa.Array) -> pa.Array:
        """Return `given` as the wire's type, every value unchanged.

        Raises:
            BadRow: A value cannot be stored in the column; names the column and the value.
        """
        given = decoded(given)
        wire = self.wire.type
        if self.wire.uuid_text:
            return self._parsed_uuids(given)
        if arrow.is_integer(given.type) and arrow.is_decimal(wire):
            given = given.cast(_ANY_INTEGER)
        result = fitted(given, wire, name=self.name, target=self.shown)
        self._check(result.flatten() if arrow.is_list(wire) else result)
        return result

    def require_fitting(self, given: pa.Array) -> None:
        """Return when `apply` takes `given`, and the server takes text of its length.

        Raises:
            BadRow: A value cannot be stored in the column; names the column and the value.
        """
        result = self.apply(given)
        limit = self.type.length
        if limit is None or not is_text(result.type):
            return
        longest = pc.max(pc.binary_length(result)).as_py()
        if longest is not None and longest > limit:
            self._refuse(result, pc.greater(pc.utf8_length(result), limit), f"over {limit} letters")

    def _check(self, values: pa.Array) -> None:
        if is_text(values.type):
            if _may_hold_nul(values):
                self._refuse(values, pc.match_substring(values, "\0"), "Postgres stores no NUL")
        elif arrow.is_date32(values.type):
            self._check_range(values, values.view(pa.int32()), _DAY_FIRST, _DAY_END)
        elif arrow.is_timestamp(values.type):
            self._check_range(values, values.view(pa.int64()), _MICROSECOND_FIRST, None)

    def _check_range(
        self, values: pa.Array, numbers: pa.Array, first: int, end: int | None
    ) -> None:
        span = pc.min_max(numbers).as_py()
        if span["min"] is not None and span["min"] < first:
            self._refuse(values, pc.less(numbers, first), "before 4714-11-24 BC")
        if end is not None and span["max"] is not None and span["max"] >= end:
            self._refuse(values, pc.greater_equal(numbers, end), "after 5874897-12-31")

    def _parsed_uuids(self, given: pa.Array) -> pa.Array:
        digits = pc.replace_substring(given, "-", "")
        self._refuse(given, pc.invert(pc.match_substring_regex(digits, f"^{_UUID_DIGITS}$")), "")
        filled = pc.fill_null(digits, "0" * 32)
        octets = pa.py_buffer(binascii.unhexlify("".join(filled.to_pylist())))
        every = pa.Array.from_buffers(pa.binary(16), len(given), [None, octets])
        result: pa.Array = pc.if_else(given.is_valid(), every, pa.scalar(None, pa.binary(16)))
        return result

    def _refuse(self, values: pa.Array, bad: pa.Array, why: str) -> None:
        """Return when `bad` is true nowhere."""
        row = pc.index(bad, True).as_py()
        if row >= 0:
            raise self._error(values, row, why)

    def _error(self, values: pa.Array, row: int, why: str) -> BadRow:
        return refused_at(values, row, name=self.name, target=self.shown, why=why)


def fits_of(target: Target, names: Sequence[str] | None = None) -> tuple[PostgresFit, ...]:
    """Return the fits of `target`, or of the columns `names` in their order."""
    fits = target.fits if names is None else target.fits_of(names)
    return tuple(fit for fit in fits if isinstance(fit, PostgresFit))


def _may_hold_nul(values: pa.Array) -> bool:
    """Return whether a NUL is among the bytes of `values`, perhaps of a value that is null."""
    _, offsets, data = values.buffers()
    if data is None or offsets is None or not len(values):
        return False
    width = np.int64 if arrow.is_large_string(values.type) else np.int32
    bounds = np.frombuffer(memoryview(offsets), dtype=width, count=values.offset + len(values) + 1)
    first, end = int(bounds[values.offset]), int(bounds[-1])
    return b"\0" in data.slice(first, end - first).to_pybytes()
