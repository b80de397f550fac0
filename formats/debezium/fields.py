"""The conversions of Debezium's JSON values, by the schema that accompanies their payload.

Debezium chooses the unit of a time by the column's precision: a DATETIME of MySQL counts
milliseconds, and a DATETIME(6) counts microseconds. Decimals and bytes are base64 texts unless its
settings differ. The values do not say which unit or encoding they have. Only the schema says it,
which Kafka Connect's JSON converter writes unless it is disabled. Without a schema, a text with two
possible meanings is refused, unless an option of the source decides.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import msgspec
import pyarrow as pa
from pyarrow import types as arrow

from onceflow.core.arrow.kinds import holds, is_bytes, is_text
from onceflow.core.errors import ConfigError

_CONNECT = "org.apache.kafka.connect.data"
_DECIMAL = f"{_CONNECT}.Decimal"
_DAYS = "days"
_UNITS: Mapping[object, str] = {
    "io.debezium.time.Timestamp": "ms",
    "io.debezium.time.MicroTimestamp": "us",
    "io.debezium.time.NanoTimestamp": "ns",
    f"{_CONNECT}.Timestamp": "ms",
    "io.debezium.time.Date": _DAYS,
    f"{_CONNECT}.Date": _DAYS,
}
"""The unit of a number, by the name of its schema."""
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_KNOWN_MAX = 64
"""The maximum number of remembered schemas. Each version of the table's columns has one."""

DECIMAL_MODES = ("string", "double")
"""The accepted values of `decimal.handling.mode` if no schema says how decimals are written."""
BINARY_MODES = ("bytes", "base64", "base64-url-safe", "hex")
_MODES_OF_TEXT = ("base64-url-safe", "hex")
"""The modes whose texts the JSON decoder does not read as bytes."""

_TWO_MEANINGS = re.compile(rb'"(?:[0-9A-Fa-f+]{4})+"')
"""A pattern found in every message that contains a text with two meanings."""
_DECIMAL_OR_BASE64 = re.compile(r"(?:[0-9eE+]{4})+")
_HEX_OR_BASE64 = re.compile(r"(?:[0-9A-Fa-f]{4})+")
_DECIMAL_ADVICE = (
    "set Debezium's decimal.handling.mode=string and give decimal_handling_mode='string', or have"
    " the schema written beside the payload (schemas.enable=true)"
)
_BINARY_ADVICE = "give binary_handling_mode= as Debezium's binary.handling.mode is set"

Convert: TypeAlias = Callable[[Any], Any]


def check_modes(decimal_mode: str | None, binary_mode: str | None) -> None:
    """Raise ConfigError if a mode is neither None nor supported."""
    if decimal_mode is not None and decimal_mode not in DECIMAL_MODES:
        raise ConfigError(
            f"decimal_handling_mode={decimal_mode!r} is not one of"
            f" {', '.join(DECIMAL_MODES)}: JSON does not say the scale of other decimals. Set"
            " Debezium's decimal.handling.mode=string, or use Avro"
        )
    if binary_mode is not None and binary_mode not in BINARY_MODES:
        raise ConfigError(
            f"binary_handling_mode={binary_mode!r} is not one of {', '.join(BINARY_MODES)}"
        )


def types_to_decode(columns: pa.Schema, binary_mode: str | None) -> pa.Schema:
    """Return the columns as the JSON decoder reads them.

    Bytes that are not base64 are read as text.
    """
    if binary_mode not in _MODES_OF_TEXT:
        return columns
    return pa.schema([column.with_type(_bytes_as_text(column.type)) for column in columns])


def _bytes_as_text(kind: pa.DataType) -> pa.DataType:
    if is_bytes(kind):
        return pa.string()
    if arrow.is_list(kind) or arrow.is_large_list(kind):
        return pa.list_(kind.value_field.with_type(_bytes_as_text(kind.value_type)))
    if arrow.is_map(kind):
        return pa.map_(kind.key_type, kind.item_field.with_type(_bytes_as_text(kind.item_type)))
    if arrow.is_struct(kind):
        return pa.struct([field.with_type(_bytes_as_text(field.type)) for field in kind])
    return kind


@dataclass(frozen=True, slots=True)
class Conversions:
    """The conversions of the values of one schema to the types of the columns."""

    fault: str | None = None
    """The reason why no record of this schema can be read, or None."""
    by_column: Sequence[tuple[int, str, Convert]] = ()
    """The (index, name, conversion) of each column whose values must be converted."""

    def convert(self, record: Any) -> None:
        """Convert the values of `record` in place to the types of its columns.

        Raises:
            ValueError: A value is finer than its column's unit or is not valid bytes, or the schema
                cannot be read at all.
        """
        if self.fault is not None:
            raise ValueError(self.fault)
        for index, name, convert in self.by_column:
            try:
                setattr(record, f"c{index}", convert(getattr(record, f"c{index}")))
            except ValueError as error:
                raise ValueError(f"column {name!r}: {error}") from None


class WrittenFields:
    """The conversions of the schemas that one reader has met, and of messages without a schema."""

    def __init__(
        self, columns: pa.Schema, decimal_mode: str | None = None, binary_mode: str | None = None
    ) -> None:
        self._columns = columns
        self._modes = _Modes(decimal_mode, binary_mode)
        self._is_needed = any(holds(kind, _depends_on_schema) for kind in columns.types)
        self._is_ambiguous = any(holds(kind, self._modes.may_have_two) for kind in columns.types)
        self._without_schema = _conversions({}, columns, self._modes)
        self._known: dict[bytes, Conversions] = {}

    def of(self, schema: msgspec.Raw) -> Conversions:
        """Return the conversions of `schema`; empty bytes mean a message without a schema."""
        text = bytes(schema)
        if not text or not self._is_needed:
            return self._without_schema
        known = self._known.get(text)
        if known is None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            known = self._known[text] = _conversions(
                _parse_fields(text), self._columns, self._modes
            )
        return known

    def may_have_two_meanings(self, text: bytes, schema: msgspec.Raw) -> bool:
        """Return True if `check_meanings` has to examine the row of the message `text`."""
        has_no_schema = self._is_ambiguous and not bytes(schema)
        return has_no_schema and _TWO_MEANINGS.search(text) is not None

    def check_meanings(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError if a text of `row`, which has no schema, may have two meanings."""
        for column in self._columns:
            why = self._modes.find_two(row.get(column.name), column.type)
            if why is not None:
                raise ValueError(f"column {column.name!r} ({column.type}): {why}")


@dataclass(frozen=True, slots=True)
class _Modes:
    """The modes in which Debezium writes decimals and bytes; None where the user gave none."""

    decimal: str | None
    binary: str | None

    def may_have_two(self, kind: pa.DataType) -> bool:
        """Return True if a text of `kind` may have two meanings without a schema."""
        return bool(
            (arrow.is_decimal(kind) and self.decimal is None)
            or (is_bytes(kind) and self.binary is None)
        )

    def find_two(self, value: Any, kind: pa.DataType) -> str | None:
        """Return the reason why the JSON `value` may mean two values of `kind`, or None."""
        if isinstance(value, str):
            return self._find_two_of_text(value, kind)
        inner: list[tuple[Any, pa.DataType]] = []
        if isinstance(value, list) and (arrow.is_list(kind) or arrow.is_large_list(kind)):
            items = cast("Sequence[Any]", value)
            inner = [(item, kind.value_type) for item in items]
        elif isinstance(value, dict):
            entries = cast("Mapping[str, Any]", value)
            if arrow.is_map(kind):
                inner = [(entry, kind.item_type) for entry in entries.values()]
            elif arrow.is_struct(kind):
                inner = [(entries.get(field.name), field.type) for field in kind]
        return next(filter(None, (self.find_two(*pair) for pair in inner)), None)

    def _find_two_of_text(self, text: str, kind: pa.DataType) -> str | None:
        if not self.may_have_two(kind):
            return None
        if arrow.is_decimal(kind) and _DECIMAL_OR_BASE64.fullmatch(text):
            # BigDecimal writes as many digits after the point as the column's scale.
            return f"{text!r} may be a number, or bytes of a decimal in base64: {_DECIMAL_ADVICE}"
        if is_bytes(kind) and _HEX_OR_BASE64.fullmatch(text):
            return f"{text!r} may be bytes in base64, or in hexadecimal digits: {_BINARY_ADVICE}"
        return None


class _Misread(Exception):
    """Raised for a schema with which no value of a column can be read."""


def _depends_on_schema(kind: pa.DataType) -> bool:
    return bool(
        arrow.is_timestamp(kind)
        or arrow.is_date(kind)
        or arrow.is_decimal(kind)
        or is_text(kind)
        or is_bytes(kind)
    )


def _parse_fields(text: bytes) -> Mapping[str, Any]:
    """Return the fields of a row by name, from the schema of an envelope or of a key."""
    envelope: Any = msgspec.json.decode(text)
    if not isinstance(envelope, dict):
        return {}
    members: list[dict[str, Any]] = cast("Any", envelope).get("fields") or []
    sides = [member for member in members if member.get("field") in ("after", "before")]
    rows: list[dict[str, Any]] = sides[0].get("fields") or [] if sides else members
    return {member["field"]: member for member in rows if "field" in member}


def _conversions(fields: Mapping[str, Any], columns: pa.Schema, modes: _Modes) -> Conversions:
    by_column: list[tuple[int, str, Convert]] = []
    for index, column in enumerate(columns):
        try:
            convert = _plan(column.type, fields.get(column.name), modes)
        except _Misread as error:
            return Conversions(f"column {column.name!r} ({column.type}) {error}")
        if convert is not None:
            by_column.append((index, column.name, _or_null(convert)))
    return Conversions(by_column=by_column)


def _plan(kind: pa.DataType, field: Mapping[str, Any] | None, modes: _Modes) -> Convert | None:
    """Return the conversion of values of `field` to `kind`, or None if they need none.

    Raises:
        _Misread: No value of the field can be read as `kind`.
    """
    if arrow.is_list(kind) or arrow.is_large_list(kind):
        inner = _plan(kind.value_type, _member(field, "items"), modes)
        return None if inner is None else _each_item(_or_null(inner))
    if arrow.is_map(kind):
        inner = _plan(kind.item_type, _member(field, "values"), modes)
        return None if inner is None else _each_entry(_or_null(inner))
    if arrow.is_struct(kind):
        return _plan_struct(kind, field, modes)
    if is_bytes(kind):
        return _plan_bytes(field, modes.binary)
    if field is not None:
        return _plan_scalar(kind, field)
    return None


def _plan_struct(
    kind: pa.DataType, field: Mapping[str, Any] | None, modes: _Modes
) -> Convert | None:
    listed: list[dict[str, Any]] = (field or {}).get("fields") or []
    members = {member.get("field"): member for member in listed}
    plans = [
        (arrow_field.name, _plan(arrow_field.type, members.get(arrow_field.name), modes))
        for arrow_field in kind
    ]
    converts = {name: _or_null(plan) for name, plan in plans if plan is not None}
    if not converts:
        return None

    def convert_members(value: Any) -> Any:
        return {
            name: converts[name](member) if name in converts else member
            for name, member in value.items()
        }

    return convert_members


def _plan_scalar(kind: pa.DataType, field: Mapping[str, Any]) -> Convert | None:
    name, is_base64 = field.get("name"), field.get("type") == "bytes"
    if name == _DECIMAL and (arrow.is_decimal(kind) or is_text(kind)):
        raise _Misread(
            f"was written as bytes in base64 ({_DECIMAL}): set Debezium's"
            " decimal.handling.mode=string, or use Avro"
        )
    if is_base64 and is_text(kind):
        raise _Misread("was written as bytes in base64: declare it BINARY")
    unit = _UNITS.get(name)
    if unit is None or not (arrow.is_timestamp(kind) or arrow.is_date(kind)):
        return None
    expected = kind.unit if arrow.is_timestamp(kind) else _DAYS
    if unit == expected:
        return None
    if _DAYS in (unit, expected):
        raise _Misread(f"was written in {unit} ({name}): give it a type of this unit")
    return _rescale(_PER_SECOND[expected], _PER_SECOND[unit])


def _plan_bytes(field: Mapping[str, Any] | None, mode: str | None) -> Convert | None:
    written = None if field is None else field.get("type")
    if field is not None and field.get("name") == _DECIMAL:
        raise _Misread(
            f"was written as the digits of a decimal ({_DECIMAL}): declare it DECIMAL, and set"
            " Debezium's decimal.handling.mode=string, or use Avro"
        )
    if written == "string" and mode in (None, "bytes"):
        raise _Misread(
            f"was written as text, which is base64 or hexadecimal digits: {_BINARY_ADVICE}"
        )
    if mode not in _MODES_OF_TEXT:
        return None
    if written == "bytes":
        return lambda text: base64.b64decode(text, validate=True)
    if mode == "hex":
        return binascii.unhexlify
    return lambda text: base64.b64decode(text, altchars=b"-_", validate=True)


def _member(field: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    member: object = None if field is None else field.get(name)
    return cast("Mapping[str, Any]", member) if isinstance(member, dict) else None


def _or_null(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _each_item(convert: Convert) -> Convert:
    return lambda values: list(map(convert, values))


def _each_entry(convert: Convert) -> Convert:
    return lambda values: {key: convert(value) for key, value in values.items()}


def _rescale(many: int, divisor: int) -> Convert:
    """Return a conversion of times from `divisor` units per second to `many` units per second."""

    def rescale(value: Any) -> Any:
        if not isinstance(value, int):
            return value
        count, remainder = divmod(value * many, divisor)
        if remainder:
            raise ValueError(f"{value} is finer than the column's unit")
        return count

    return rescale
