"""The Arrow types that a SQLite column keeps unchanged, and the form in which they are stored.

SQLite has numbers, text and bytes. Dates, times and decimals are stored as text, in forms that
SQLite's own functions read and that sort in the right order: 2024-02-29, 2024-02-29
12:00:00.000000, with +00:00 for an instant, and 12.50.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow
from typing_extensions import override

from onceflow.clients.sql.tables import ColumnFit
from onceflow.clients.sql.values import (
    NO_NEGATIVE_ZERO,
    are_negative_zeros,
    bad_row_at,
    fit_column,
    float_type,
)
from onceflow.clients.sqlite.catalog import Affinity, SQLiteType
from onceflow.core.arrow.instants import rows_beyond_python
from onceflow.core.arrow.kinds import is_bytes, is_text

_MANTISSA_BITS = 53
_UTC, _NOTHING = pa.scalar("+00:00", pa.large_string()), pa.scalar("", pa.large_string())
_OUTSIDE = "SQLite reads the years 1 to 9999"
# A text that a column of numbers would turn into a number. SQLite skips the spaces of ASCII, among
# them the vertical tab, which `\s` does not match.
_NUMERAL = r"^[\t-\r ]*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?[\t-\r ]*$"


@dataclass(frozen=True, slots=True)
class SQLiteFit(ColumnFit):
    """A conversion of a column of a batch to the values that are bound for its table column."""

    type: SQLiteType = field(kw_only=True)
    """The type of the table's column."""

    @override
    def takes(self, given: pa.DataType) -> bool:
        return wire_of(given, self.type) is not None

    @override
    def cast(self, given: pa.Array) -> pa.Array:
        if arrow.is_date(given.type) or arrow.is_timestamp(given.type):
            self._require_years(given)
        if arrow.is_large_string(self.wire) and not is_text(given.type):
            given = self._texts(given)
        return super(SQLiteFit, self).cast(given)

    @override
    def check(self, values: pa.Array) -> None:
        if arrow.is_floating(values.type):
            self.refuse(values, pc.is_nan(values), "SQLite would store null instead")
            if self.type.affinity is Affinity.REAL:
                # Such a column stores whole numbers as integers in the file.
                self.refuse(values, are_negative_zeros(values), NO_NEGATIVE_ZERO)
        elif self.type.affinity is Affinity.TEMPORAL:
            numerals = pc.match_substring_regex(values, _NUMERAL)
            self.refuse(values, numerals, "SQLite would store a number instead")

    def _require_years(self, given: pa.Array) -> None:
        """Refuse dates and times outside the years that SQLite's own functions read."""
        rows = rows_beyond_python(given)
        if rows:
            raise bad_row_at(given, rows[0], name=self.name, target=self.shown, why=_OUTSIDE)

    def _texts(self, given: pa.Array) -> pa.Array:
        """Return decimals, and times exact to the microsecond, as text; other values unchanged."""
        if arrow.is_decimal(given.type):
            return _digits(given)
        if arrow.is_time(given.type):
            return self._exact(given, pa.time64("us"))
        if not arrow.is_timestamp(given.type):
            return given
        zone = given.type.tz
        instants = self._exact(given, pa.timestamp("us", zone))
        if not zone:
            return instants
        # The microseconds are in UTC, in whatever zone they are shown.
        texts = instants.view(pa.int64()).cast(pa.timestamp("us")).cast(pa.large_string())
        ended: pa.Array = pc.binary_join_element_wise(texts, _UTC, _NOTHING)
        return ended

    def _exact(self, given: pa.Array, kind: pa.DataType) -> pa.Array:
        return fit_column(given, kind, name=self.name, target=self.shown)


def _digits(decimals: pa.Array) -> pa.Array:
    """Return decimals as text without an exponent, which Arrow uses for the smallest ones."""
    texts = decimals.cast(pa.large_string())
    if not pc.any(pc.match_substring(texts, "E")).as_py():
        return texts
    spelled = [None if value is None else f"{value:f}" for value in decimals.to_pylist()]
    return pa.array(spelled, pa.large_string())


def wire_of(given: pa.DataType, target: SQLiteType) -> pa.DataType | None:
    """Return the type to which `given` is converted for `target`, or None if values change.

    `given` is a plain type: dictionaries, run-end encodings and extensions are already decoded.
    """
    if arrow.is_null(given):
        return given
    if target.affinity is Affinity.REAL and arrow.is_integer(given):
        return float_type(given, mantissa_bits=_MANTISSA_BITS)
    kept = find_storage(given)
    return kept.wire if kept and target.affinity in kept.affinities else None


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored form of values of some types."""

    wire: pa.DataType
    affinities: frozenset[Affinity]
    """The affinities of columns that keep the values unchanged."""


def find_storage(given: pa.DataType) -> Stored | None:
    """Return the stored form of values of `given`, or None if they cannot be kept unchanged."""
    if arrow.is_integer(given) or arrow.is_boolean(given):
        return _NUMBERS
    if arrow.is_floating(given):
        return _FLOATS
    if is_bytes(given):
        return _BYTES
    if arrow.is_decimal(given):
        # With a negative scale the text would have an exponent.
        return _DECIMALS if given.scale >= 0 else None
    temporal = arrow.is_date(given) or arrow.is_time(given) or arrow.is_timestamp(given)
    return _TEXTS if temporal or is_text(given) else None


def _store_as(wire: pa.DataType, *kept_by: Affinity) -> Stored:
    return Stored(wire, frozenset((*kept_by, Affinity.NONE)))


_NUMBERS = _store_as(pa.int64(), Affinity.INTEGER, Affinity.NUMERIC)
_FLOATS = _store_as(pa.float64(), Affinity.REAL)
_BYTES = _store_as(pa.large_binary(), Affinity.BLOB)
_TEXTS = _store_as(pa.large_string(), Affinity.TEXT, Affinity.TEMPORAL)
_DECIMALS = _store_as(pa.large_string(), Affinity.TEXT)
