"""Makes the columns of a batch fit a table's columns, or names the value that does not.

Whatever the server would cut, round, pad, replace by a default or refuse late is looked for here,
whole columns at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from types import MappingProxyType

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.core.errors import SinkError
from onceflow.sinks.mysql.catalog import TEXTS, MySQLType
from onceflow.sinks.mysql.types import Wire, wire_of
from onceflow.sinks.sql.tables import TableColumn, Target
from onceflow.sinks.sql.values import decoded, fitted, refused_at

# Days and microseconds from 1970. Year 0 is MySQL's mark for dates that are none.
_DAY_FIRST, _DAY_LAST = -719_162, 2_932_896
_MICROSECOND_FIRST, _MICROSECOND_LAST = -62_135_596_800_000_000, 253_402_300_799_999_999
# 0 is the zero date, and seconds are 32 bits; MariaDB 11.5 goes further, which nobody relies on.
_INSTANT_FIRST, _INSTANT_LAST = 1_000_000, 2_147_483_647_999_999
_MEDIUMINT: Mapping[bool, tuple[int, int]] = MappingProxyType(
    {True: (0, 2**24 - 1), False: (-(2**23), 2**23 - 1)}
)
# uint64 has 20 digits; Arrow casts integers only to decimals that hold all of their type.
_ANY_INTEGER = pa.decimal128(20, 0)
_MICROSECOND_DIGITS = 6
_UUID = "^[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}$"


@dataclass(frozen=True, slots=True)
class MySQLFit:
    """Takes one column of a batch to what is spelled for one column of the table."""

    column: TableColumn
    type: MySQLType
    """The column's."""
    wire: Wire
    is_key: bool = False
    """Whether rows are found by it."""

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
            SinkError: The type is not the one that was announced.
        """
        given = decoded(given)
        wire = self.wire.type
        if given.type != wire and wire_of(given.type, self.type) is None:
            raise SinkError(
                f"column {self.name!r}: a batch has Arrow type {given.type}, which does not go "
                f"into the table's type {self.shown}"
            )
        if given.null_count and not self.column.nullable:
            # When it loads a file the server would put a default in its place.
            self._refuse(given, given.is_null(), "it is NOT NULL")
        if arrow.is_integer(given.type) and arrow.is_decimal(wire):
            given = given.cast(_ANY_INTEGER)
        result = fitted(given, wire, name=self.name, target=self.shown)
        check = _CHECKS.get(self.type.name)
        if check is not None and len(result) > result.null_count:
            check(self, result)
        return result

    def require_fitting(self, given: pa.Array) -> None:
        """Return when `apply` takes what is not null in `given`.

        Raises:
            BadRow: A value cannot be stored in the column; names the column and the value.
            SinkError: The type is not the one that was announced.
        """
        lenient = replace(self, column=replace(self.column, nullable=True))
        lenient.apply(given)

    def check_decimal(self, values: pa.Array) -> None:
        """Refuse what is below zero where nothing is."""
        if self.type.unsigned:
            self._refuse(values, pc.less(values, pa.scalar(Decimal(0), values.type)), "below zero")

    def check_float(self, values: pa.Array) -> None:
        """Refuse what is no number."""
        self._refuse(values, pc.invert(pc.is_finite(values)), "it stores neither NaN nor infinity")
        if self.type.unsigned:
            self._refuse(values, pc.less(values, 0), "below zero")

    def check_mediumint(self, values: pa.Array) -> None:
        """Refuse what has over 24 bits."""
        self._check_range(values, values, *_MEDIUMINT[self.type.unsigned])

    def check_bits(self, values: pa.Array) -> None:
        """Refuse what has more bits than the column."""
        bits = self.type.precision or 1
        self._check_range(values, values, 0, 2**bits - 1)

    def check_date(self, values: pa.Array) -> None:
        """Refuse days outside the years 1 to 9999."""
        self._check_range(values, values.view(pa.int32()), _DAY_FIRST, _DAY_LAST)

    def check_datetime(self, values: pa.Array) -> None:
        """Refuse times outside the years 1 to 9999, and those that would be rounded."""
        self._check_range(values, values.view(pa.int64()), _MICROSECOND_FIRST, _MICROSECOND_LAST)
        self._check_fraction(values)

    def check_timestamp(self, values: pa.Array) -> None:
        """Refuse instants outside 1970 to 2038, and those that would be rounded."""
        self._check_range(values, values.view(pa.int64()), _INSTANT_FIRST, _INSTANT_LAST)
        self._check_fraction(values)

    def check_time(self, values: pa.Array) -> None:
        """Refuse times of day that would be rounded."""
        self._check_fraction(values)

    def check_text(self, values: pa.Array) -> None:
        """Refuse what is too long, what loses its last spaces, and what the charset lacks."""
        kind = self.type
        lengths = pc.binary_length(values)
        longest = pc.max(lengths).as_py()
        if kind.length is not None and longest > kind.length:
            over = pc.greater(pc.utf8_length(values), kind.length)
            self._refuse(values, over, f"over {kind.length} letters")
        if kind.octets is not None and longest > kind.octets:
            self._refuse(values, pc.greater(lengths, kind.octets), f"over {kind.octets} bytes")
        if kind.name == "char" or (self.is_key and _pads(kind.collation)):
            last = pc.ends_with(values, " ")
            self._refuse(values, last, "spaces at its end are not kept, or not told apart")
        if kind.charset in ("utf8mb3", "utf8"):
            wide = pc.match_substring_regex(values, "[\\x{10000}-\\x{10FFFF}]")
            self._refuse(values, wide, f"{kind.charset} has only characters of up to 3 bytes")
        elif kind.charset == "ascii":
            self._refuse(values, pc.invert(pc.string_is_ascii(values)), "its charset is ascii")

    def check_enum(self, values: pa.Array) -> None:
        """Refuse what is no member, to the letter."""
        members = pa.array(list(self.type.members), values.type)
        foreign = pc.and_(pc.invert(pc.is_in(values, members)), values.is_valid())
        self._refuse(values, foreign, "it is none of its members, letter by letter")

    def check_uuid(self, values: pa.Array) -> None:
        """Refuse text that is no UUID."""
        self._refuse(values, pc.invert(pc.match_substring_regex(values, _UUID)), "it is no UUID")

    def check_bytes(self, values: pa.Array) -> None:
        """Refuse what is too long, or would be padded."""
        limit = self.type.length
        if limit is None:
            return
        lengths = pc.binary_length(values)
        if self.type.name == "binary":
            self._refuse(values, pc.not_equal(lengths, limit), f"it must have {limit} bytes")
        self._refuse(values, pc.greater(lengths, limit), f"over {limit} bytes")

    def _check_fraction(self, values: pa.Array) -> None:
        digits = self.type.fraction_digits
        if digits >= _MICROSECOND_DIGITS:
            return
        unit = 10 ** (_MICROSECOND_DIGITS - digits)
        numbers = values.view(pa.int64())
        rest = pc.subtract(numbers, pc.multiply(pc.divide(numbers, unit), unit))
        self._refuse(values, pc.not_equal(rest, 0), f"it keeps {digits} digits of a second")

    def _check_range(self, values: pa.Array, numbers: pa.Array, first: int, last: int) -> None:
        span = pc.min_max(numbers).as_py()
        if span["min"] < first or span["max"] > last:
            low = pc.less(numbers, pa.scalar(first, numbers.type))
            # A bound over the type's own is never passed.
            high = pc.greater(numbers.cast(pa.decimal128(20)), pa.scalar(last, pa.decimal128(20)))
            self._refuse(values, pc.or_(low, high), "out of its range")

    def _refuse(self, values: pa.Array, bad: pa.Array, why: str) -> None:
        """Return when `bad` is true nowhere."""
        row = pc.index(bad, True).as_py()
        if row >= 0:
            raise refused_at(values, row, name=self.name, target=self.shown, why=why)


def fits_of(target: Target, names: Sequence[str] | None = None) -> tuple[MySQLFit, ...]:
    """Return the fits of `target`, or of the columns `names` in their order."""
    fits = target.fits if names is None else target.fits_of(names)
    return tuple(fit for fit in fits if isinstance(fit, MySQLFit))


def fitted_rows(fits: Sequence[MySQLFit], rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns of `rows` that `fits` are of, in their order, as they are spelled.

    Raises:
        BadRow: A value does not fit; names column and value.
        SinkError: The rows have other columns than announced.
    """
    if not {fit.name for fit in fits} <= set(rows.schema.names):
        raise SinkError(
            f"a batch has the columns {rows.schema.names}, and {[fit.name for fit in fits]} were "
            "announced"
        )
    columns = [fit.apply(rows.column(fit.name)) for fit in fits]
    return pa.RecordBatch.from_arrays(columns, names=[fit.name for fit in fits])


def _pads(collation: str) -> bool:
    """Return whether a collation takes text for equal that differs in spaces at the end."""
    return not ("_nopad_" in collation or "_0900_" in collation or collation == "binary")


_CHECKS: Mapping[str, Callable[[MySQLFit, pa.Array], None]] = MappingProxyType(
    {
        **dict.fromkeys(sorted(TEXTS), MySQLFit.check_text),
        **dict.fromkeys(
            ("binary", "varbinary", "tinyblob", "blob", "mediumblob"), MySQLFit.check_bytes
        ),
        "float": MySQLFit.check_float,
        "double": MySQLFit.check_float,
        "decimal": MySQLFit.check_decimal,
        "mediumint": MySQLFit.check_mediumint,
        "bit": MySQLFit.check_bits,
        "date": MySQLFit.check_date,
        "datetime": MySQLFit.check_datetime,
        "timestamp": MySQLFit.check_timestamp,
        "time": MySQLFit.check_time,
        "enum": MySQLFit.check_enum,
        "uuid": MySQLFit.check_uuid,
    }
)
