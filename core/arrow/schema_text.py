"""A parser of schemas given as an Arrow or Spark schema, DDL text, or names and types.

    "id BIGINT NOT NULL, account STRING, amount DECIMAL(12, 2), tags ARRAY<STRING>"
    {"id": "bigint", "at": pa.timestamp("ms", "UTC")}

Source of the type names: Spark SQL reference, "Data Types".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa
from typing_extensions import TypeIs

from onceflow.core.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

SchemaLike: TypeAlias = "pa.Schema | StructType | str | Mapping[str, pa.DataType | str]"

_SIMPLE_TYPES: dict[str, pa.DataType] = {
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ltz": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "decimal": pa.decimal128(10, 0),
    "dec": pa.decimal128(10, 0),
    "numeric": pa.decimal128(10, 0),
}
_TOKEN = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([A-Za-z_][A-Za-z0-9_]*)|(\d+)|([<>(),:]))")


def schema_of(schema: SchemaLike, *, setting: str = "schema") -> pa.Schema:
    """Return the Arrow schema that `schema` describes.

    Raises:
        ConfigError: `schema` is invalid; names the position of the error.
    """
    described = _read_schema(schema, setting)
    if len(described) == 0:
        raise ConfigError(f"{setting} has no column; name at least one")
    doubled = sorted({name for name in described.names if described.names.count(name) > 1})
    if doubled:
        raise ConfigError(f"{setting} names the columns {doubled} more than once")
    return described


def _read_schema(schema: SchemaLike, setting: str) -> pa.Schema:
    if isinstance(schema, str):
        return _Ddl(schema, setting).schema()
    if isinstance(schema, Mapping):
        return pa.schema(
            [
                pa.field(name, _Ddl(kind, setting).only_type() if isinstance(kind, str) else kind)
                for name, kind in schema.items()
            ]
        )
    if _is_struct_type(schema):
        return pa.schema(
            [
                pa.field(
                    field.name,
                    _to_type(field.dataType, f"{setting}: column {field.name!r}"),
                    nullable=field.nullable,
                )
                for field in schema.fields
            ]
        )
    return schema


def _is_struct_type(schema: object) -> TypeIs[StructType]:
    """Return True if `schema` is a Spark schema. Does not import pyspark."""
    types = sys.modules.get("pyspark.sql.types")
    return types is not None and isinstance(schema, types.StructType)


def _to_type(kind: DataType, setting: str) -> pa.DataType:
    """Return the Arrow type for a Spark type, whose fields may have any names.

    Parts of nested types become nullable, even if Spark says otherwise, as in DDL text.
    """
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, ArrayType):
        return pa.list_(_to_type(kind.elementType, setting))
    if isinstance(kind, MapType):
        return pa.map_(_to_type(kind.keyType, setting), _to_type(kind.valueType, setting))
    if isinstance(kind, StructType):
        return pa.struct(
            [pa.field(field.name, _to_type(field.dataType, setting)) for field in kind.fields]
        )
    return _Ddl(kind.simpleString(), setting).only_type()


class _Ddl:
    """A recursive-descent parser over one piece of DDL text."""

    def __init__(self, text: str, setting: str) -> None:
        self._text = text
        self._setting = setting
        self._tokens: list[tuple[str, int, bool]] = []
        """The text, start and quoting of each token. A quoted token is a name, never a keyword."""
        at, end = 0, len(text.rstrip())
        while at < end:
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._error(at, "no name, number or sign of a type")
            quoted = match[1] is not None
            token = match[1].replace("``", "`") if quoted else match[0].strip()
            self._tokens.append((token, match.start(), quoted))
            at = match.end()
        self._next = 0

    def schema(self) -> pa.Schema:
        fields = [self._column()]
        while self._accept(","):
            fields.append(self._column())
        self._end()
        return pa.schema(fields)

    def only_type(self) -> pa.DataType:
        kind = self._type()
        self._end()
        return kind

    def _column(self) -> pa.Field:
        name = self._name("a column name")
        self._accept(":")
        kind = self._type()
        required = self._accept("not")
        if required and not self._accept("null"):
            raise self._error(self._at(), "NOT without NULL")
        return pa.field(name, kind, nullable=not required)

    def _type(self) -> pa.DataType:
        at = self._at()
        name = self._name("a type").lower()
        if name == "array":
            self._expect("<")
            item = self._type()
            self._expect(">")
            return pa.list_(item)
        if name == "map":
            self._expect("<")
            key = self._type()
            self._expect(",")
            value = self._type()
            self._expect(">")
            return pa.map_(key, value)
        if name == "struct":
            self._expect("<")
            fields = [self._column()]
            while self._accept(","):
                fields.append(self._column())
            self._expect(">")
            return pa.struct(fields)
        if name in ("decimal", "dec", "numeric") and self._accept("("):
            return self._decimal(at)
        known = _SIMPLE_TYPES.get(name)
        if known is None:
            raise self._error(at, f"the type {name!r} is not one of {', '.join(_SIMPLE_TYPES)}")
        return known

    def _decimal(self, at: int) -> pa.DataType:
        precision = self._number()
        scale = self._number() if self._accept(",") else 0
        self._expect(")")
        if not 1 <= precision <= 38 or scale > precision:
            raise self._error(at, "a decimal has 1 to 38 digits, and no more of them as fraction")
        return pa.decimal128(precision, scale)

    def _name(self, expected: str) -> str:
        if self._next < len(self._tokens):
            token, _, quoted = self._tokens[self._next]
            if quoted or token.isidentifier():
                self._next += 1
                return token
        raise self._error(self._at(), f"{expected} is missing")

    def _number(self) -> int:
        if self._next < len(self._tokens) and self._tokens[self._next][0].isdecimal():
            self._next += 1
            return int(self._tokens[self._next - 1][0])
        raise self._error(self._at(), "a number is missing")

    def _accept(self, sign: str) -> bool:
        if self._next < len(self._tokens):
            token, _, quoted = self._tokens[self._next]
            if not quoted and token.lower() == sign:
                self._next += 1
                return True
        return False

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            raise self._error(self._at(), f"{sign!r} is missing")

    def _end(self) -> None:
        if self._next < len(self._tokens):
            raise self._error(self._at(), "this was not expected here")

    def _at(self) -> int:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else len(self._text)

    def _error(self, at: int, reason: str) -> ConfigError:
        remainder = self._text[at : at + 30].strip() or "its end"
        return ConfigError(f"{self._setting} {self._text!r}: {reason}, at {remainder!r}")


def columns_difference(first: pa.Schema, other: pa.Schema, number: int) -> str:
    """Return the error text for a stream whose columns differ from those of the first stream.

    `number` is the position of the stream in the call of union().
    """
    if first.names != other.names:
        theirs, ours = ", ".join(other.names), ", ".join(first.names)
        what = f"it has columns {theirs}, and the first stream {ours}"
    else:
        pairs = zip(first, other, strict=True)
        first_field, two = next((a, b) for a, b in pairs if not a.equals(b))
        shown = _describe_field(first_field)
        what = f"its column {_describe_field(two)}, and that of the first stream {shown}"
    return (
        f"union() with other streams, number {number}: {what}; make them alike with"
        " .map_batches(lambda rows: …, schema=…) first"
    )


def _describe_field(field: pa.Field) -> str:
    return f"{field.name} is {field.type}{'' if field.nullable else ' not null'}"
