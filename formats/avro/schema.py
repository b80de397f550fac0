"""The conversion between Avro schemas, parsed to a tree of nodes, and Arrow types.

Logical types become Arrow's own: dates, times, timestamps (in UTC unless "local-"), and decimals of
bytes and of fixed. An enum becomes text. A union of null and one other type becomes that type,
nullable. A union of several others becomes a struct with a member for each, of which only one is
set, as in Spark. A type that contains itself has no Arrow type and is refused.

Source of the format: Apache Avro 1.12 specification.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.core.arrow.kinds import IsKind, is_bytes, is_list, is_text, to_plain_type
from onceflow.core.errors import ConfigError
from onceflow.formats import registry_schemas
from onceflow.formats.faulty_parts import ENTRIES, ITEMS


@dataclass(frozen=True, slots=True)
class Scalar:
    """A primitive type: null, boolean, int, long, float, double, bytes or string."""

    kind: str
    arrow: pa.DataType


@dataclass(frozen=True, slots=True)
class Fixed:
    """A type with a fixed number of bytes."""

    size_bytes: int
    arrow: pa.DataType
    name: str
    aliases: tuple[str, ...] = dataclasses.field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Symbols:
    """An enum."""

    names: tuple[str, ...]
    name: str
    aliases: tuple[str, ...] = dataclasses.field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Items:
    """An array."""

    item: AvroType


@dataclass(frozen=True, slots=True)
class Entries:
    """A map with text as keys."""

    value: AvroType


@dataclass(frozen=True, slots=True)
class Union:
    """A union of several types."""

    branches: tuple[AvroType, ...]

    @property
    def nullable(self) -> bool:
        """True if null is one of the types."""
        return any(is_null(branch) for branch in self.branches)


class _Missing:
    def __repr__(self) -> str:
        return "no default"


MISSING: Final = _Missing()


@dataclass(frozen=True, slots=True)
class Member:
    """A field of a record."""

    name: str
    type: AvroType
    default: Any = MISSING
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """A record."""

    name: str
    members: tuple[Member, ...]
    aliases: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """The full names that the type had before, like those of `Fixed` and `Symbols`."""


AvroType: TypeAlias = Scalar | Fixed | Symbols | Items | Entries | Union | Record

_PRIMITIVES: Mapping[str, pa.DataType] = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_LOGICAL: Mapping[tuple[str, str], pa.DataType] = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time32("ms"),
    ("long", "time-micros"): pa.time64("us"),
    ("long", "timestamp-millis"): pa.timestamp("ms", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
    ("long", "timestamp-nanos"): pa.timestamp("ns", "UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("ms"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
    ("long", "local-timestamp-nanos"): pa.timestamp("ns"),
}
"""The known logical types. Unknown ones are ignored, as the specification says."""
_DEBEZIUM: Mapping[tuple[str, str], pa.DataType] = {
    ("int", "io.debezium.time.Date"): pa.date32(),
    ("int", "io.debezium.time.Time"): pa.time32("ms"),
    ("long", "io.debezium.time.MicroTime"): pa.time64("us"),
    ("long", "io.debezium.time.Timestamp"): pa.timestamp("ms"),
    ("long", "io.debezium.time.MicroTimestamp"): pa.timestamp("us"),
    ("long", "io.debezium.time.NanoTimestamp"): pa.timestamp("ns"),
}
"""Debezium's own types of times, which it names in addition to Avro's. They have no zone."""
_DECIMAL128_DIGITS = 38
_DECIMAL256_DIGITS = 76
_DECIMAL128_BYTES = 16


def is_null(node: AvroType) -> bool:
    """Return True if `node` can only be null."""
    return isinstance(node, Scalar) and node.kind == "null"


def parse_avro(text: str, references: Sequence[str] = ()) -> AvroType:
    """Return the tree of the schema `text`.

    Args:
        text: The schema, as JSON.
        references: Schemas that it refers to, in the order of their dependencies: each schema
            comes after those that it refers to itself.

    Raises:
        ConfigError: It is not an Avro schema, or it is recursive.
    """
    parser = _Parser()
    for reference in references:
        parser.parse(_json(reference), "")
    return parser.parse(_json(text), "")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        # The bare name of a primitive type is also a schema.
        if text.strip() in _PRIMITIVES:
            return text.strip()
        raise ConfigError(
            f"its schema is neither JSON nor the name of an Avro type: {text[:100]!r}"
        ) from None


class _Parser:
    def __init__(self) -> None:
        self._named: dict[str, AvroType] = {}
        self._open: list[str] = []

    def parse(self, node: Any, space: str) -> AvroType:
        match node:
            case str():
                return self._by_name(node, space)
            case list():
                branches: Sequence[Any] = cast("Any", node)
                return Union(tuple(self.parse(branch, space) for branch in branches))
            case dict():
                return self._parse_object(cast("dict[str, Any]", node), space)
            case _:
                raise ConfigError(
                    f"its schema has {node!r:.100} where an Avro type must be: a name, a list or an"
                    " object"
                )

    def _by_name(self, name: str, space: str) -> AvroType:
        if name in _PRIMITIVES:
            return Scalar(name, _PRIMITIVES[name])
        # Look for a short name in the surrounding namespace first, then without a namespace.
        for full in [name] if "." in name else [f"{space}.{name}" if space else name, name]:
            if full in self._open:
                raise ConfigError(f"the Avro type {full} contains itself, which no column can hold")
            if full in self._named:
                return self._named[full]
        raise ConfigError(f"the Avro schema uses {name!r}, which it does not define")

    def _parse_object(self, node: dict[str, Any], space: str) -> AvroType:
        kind = node.get("type")
        node_type: AvroType
        match kind:
            case "record" | "error":
                node_type = self._record(node, space)
            case "enum":
                name, inner = _full_name(node, space)
                node_type = Symbols(tuple(node.get("symbols", ())), name, _aliases(node, inner))
                self._named[name] = node_type
            case "fixed":
                name, inner = _full_name(node, space)
                node_type = _parse_fixed(node, name, _aliases(node, inner))
                self._named[name] = node_type
            case "array":
                node_type = Items(self.parse(node.get("items"), space))
            case "map":
                node_type = Entries(self.parse(node.get("values"), space))
            case str() if kind in _PRIMITIVES:
                node_type = Scalar(kind, _logical(kind, node))
            case _:
                node_type = self.parse(kind, space)
        return node_type

    def _record(self, node: dict[str, Any], space: str) -> Record:
        name, inner = _full_name(node, space)
        # Keep the record open while its members are parsed, to detect a member that refers to the
        # record itself.
        self._open.append(name)
        members = tuple(
            Member(
                str(field["name"]),
                self.parse(field.get("type"), inner),
                field.get("default", MISSING),
                tuple(field.get("aliases", ())),
            )
            for field in node.get("fields", ())
        )
        self._open.pop()
        self._named[name] = record = Record(name, members, _aliases(node, inner))
        return record


def _full_name(node: Mapping[str, Any], space: str) -> tuple[str, str]:
    """Return the full name of the type that `node` defines, and the namespace inside it."""
    name = str(node.get("name", ""))
    if "." in name:
        return name, name.rpartition(".")[0]
    # An empty namespace means no namespace, rather than the surrounding one.
    inner = str(node.get("namespace", space) or "")
    return (f"{inner}.{name}" if inner else name), inner


def _aliases(node: Mapping[str, Any], space: str) -> tuple[str, ...]:
    """Return the full names that the type had before; short names are in its own namespace."""
    return tuple(
        f"{space}.{alias}" if space and "." not in alias else str(alias)
        for alias in node.get("aliases", ())
    )


def _parse_fixed(node: Mapping[str, Any], name: str, aliases: tuple[str, ...]) -> Fixed:
    size = int(node.get("size", 0))
    plain = pa.binary(size)
    is_decimal = node.get("logicalType") == "decimal"
    return Fixed(size, _decimal(node, size, plain) if is_decimal else plain, name, aliases)


def _logical(kind: str, node: Mapping[str, Any]) -> pa.DataType:
    logical = str(node.get("logicalType", ""))
    if (kind, logical) == ("bytes", "decimal"):
        return _decimal(node, 0, pa.binary())
    known = _LOGICAL.get((kind, logical))
    named = (kind, str(node.get("connect.name", "")))
    return known or _DEBEZIUM.get(named, _PRIMITIVES[kind])


def _decimal(node: Mapping[str, Any], size: int, plain: pa.DataType) -> pa.DataType:
    """Return the decimal type, or `plain` if Arrow has no decimal of that precision.

    In this case the logical type is ignored, as the specification demands for invalid ones.
    """
    precision, scale = int(node.get("precision", 0)), int(node.get("scale", 0))
    if not 0 < precision <= _DECIMAL256_DIGITS:
        return plain
    wide = precision > _DECIMAL128_DIGITS or size > _DECIMAL128_BYTES
    return (pa.decimal256 if wide else pa.decimal128)(precision, scale)


def arrow_type(node: AvroType) -> pa.DataType:
    """Return the Arrow type of values of `node`."""
    result: pa.DataType
    match node:
        case Scalar(arrow=kind) | Fixed(arrow=kind):
            result = kind
        case Symbols():
            result = pa.string()
        case Items(item=item):
            result = pa.list_(pa.field("item", arrow_type(item), nullable=is_nullable(item)))
        case Entries(value=value):
            entry = pa.field("value", arrow_type(value), nullable=is_nullable(value))
            result = pa.map_(pa.string(), entry)
        case Record(members=members):
            result = pa.struct([arrow_field(member) for member in members])
        case Union():
            result = _union_type(values_of(node))
    return result


def _union_type(values: tuple[AvroType, ...]) -> pa.DataType:
    if not values:
        return pa.null()
    if len(values) == 1:
        return arrow_type(values[0])
    # Few other programs support Arrow's unions. So use a struct with one field for each branch, of
    # which only one is set.
    return pa.struct(
        [pa.field(f"member{at}", arrow_type(branch)) for at, branch in enumerate(values)]
    )


def values_of(union: Union) -> tuple[AvroType, ...]:
    """Return the types of `union` that are not null."""
    return tuple(branch for branch in union.branches if not is_null(branch))


def is_nullable(node: AvroType) -> bool:
    """Return True if a value may be null."""
    return is_null(node) or (isinstance(node, Union) and node.nullable)


def arrow_field(member: Member) -> pa.Field:
    """Return the Arrow field of a record's `member`."""
    return pa.field(member.name, arrow_type(member.type), nullable=is_nullable(member.type))


def record_of(node: AvroType, *, what: str) -> Record:
    """Return `node`, whose members become columns.

    Raises:
        ConfigError: `node` is not a record.
    """
    if not isinstance(node, Record):
        raise ConfigError(
            f"{what} is not an Avro record, and columns can only be made of a record's fields"
        )
    return node


def columns_of(record: Record) -> pa.Schema:
    """Return the columns that a record's members become."""
    return pa.schema([arrow_field(member) for member in record.members])


_UNITS = {"s": "millis", "ms": "millis", "us": "micros", "ns": "nanos"}
_WRITTEN: tuple[tuple[IsKind, str], ...] = (
    (arrow.is_null, "null"),
    (arrow.is_boolean, "boolean"),
    (arrow.is_int64, "long"),
    (arrow.is_uint32, "long"),
    # Avro's long has a sign.
    (lambda kind: arrow.is_integer(kind) and not arrow.is_uint64(kind), "int"),
    (arrow.is_float32, "float"),
    (arrow.is_float64, "double"),
    (is_text, "string"),
    (is_bytes, "bytes"),
)


def avro_text(columns: pa.Schema, name: str) -> str:
    """Return the schema of records with `columns`, with the name `name`.

    Nullable columns become unions with null and the default null, so that they can be added and
    removed later.

    Raises:
        ConfigError: A column has a name or a type that Avro does not have.
    """
    return json.dumps(_record_text(list(columns), registry_schemas.to_schema_name(name), ""))


def avro_text_of(field: pa.Field, name: str) -> str:
    """Return the schema of the values of one column, which are not records.

    Raises:
        ConfigError: Avro does not have their type.
    """
    return json.dumps(_type_text(field.type, registry_schemas.to_schema_name(name), field.name))


def _record_text(fields: Sequence[pa.Field], name: str, path: str) -> dict[str, Any]:
    """Return the schema of records with `fields`. Their paths in errors begin with `path`."""
    members: list[dict[str, Any]] = []
    for field in fields:
        registry_schemas.check_field_name(field.name, "Avro", path)
        kind = _nullable_text(field, f"{name}_{field.name}", path + field.name)
        # Avro requires that a default is of the union's first branch, so null comes first.
        default = {"default": None} if isinstance(kind, list) else {}
        members.append({"name": field.name, "type": kind, **default})
    return {"type": "record", "name": name, "fields": members}


def _nullable_text(field: pa.Field, name: str, path: str) -> Any:
    kind = _type_text(field.type, name, path)
    return ["null", kind] if field.nullable and kind != "null" else kind


def _type_text(kind: pa.DataType, name: str, path: str) -> Any:
    kind = to_plain_type(kind)
    if arrow.is_struct(kind):
        return _record_text(list(kind), name, f"{path}.")
    if is_list(kind):
        return {
            "type": "array",
            "items": _nullable_text(kind.value_field, f"{name}_item", path + ITEMS),
        }
    if arrow.is_map(kind) and is_text(kind.key_type):
        return {
            "type": "map",
            "values": _nullable_text(kind.item_field, f"{name}_item", path + ENTRIES),
        }
    if arrow.is_decimal(kind):
        _require_scale(kind, path)
    return _logical_text(kind) or registry_schemas.require_kind(kind, _WRITTEN, path, "Avro")


def _require_scale(kind: pa.DataType, column: str) -> None:
    """Raise ConfigError if Avro's decimals cannot have the scale of `kind`.

    Readers would read such a field as bytes, or refuse the schema.
    """
    if 0 <= kind.scale <= kind.precision:
        return
    scale = max(kind.scale, 0)
    wider = f"decimal({max(kind.precision - min(kind.scale, 0), scale)}, {scale})"
    raise ConfigError(
        f"column {column!r} is {kind}, and a decimal of Avro has a scale from 0 to its precision: "
        f"cast the column to {wider} before the sink, which holds the same numbers"
    )


def _logical_text(kind: pa.DataType) -> dict[str, Any] | None:
    if arrow.is_timestamp(kind):
        zone = "" if kind.tz else "local-"
        return {"type": "long", "logicalType": f"{zone}timestamp-{_UNITS[kind.unit]}"}
    if arrow.is_date(kind):
        return {"type": "int", "logicalType": "date"}
    if arrow.is_time32(kind):
        return {"type": "int", "logicalType": "time-millis"}
    if arrow.is_time64(kind):
        return {"type": "long", "logicalType": "time-micros"}
    if arrow.is_decimal(kind):
        digits = {"precision": kind.precision, "scale": kind.scale}
        return {"type": "bytes", "logicalType": "decimal", **digits}
    return None
