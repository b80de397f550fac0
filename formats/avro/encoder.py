"""The encoding of rows as Avro records, by the schema that the registry has for them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import pyarrow as pa
from pyarrow import types as arrow

from onceflow.core.arrow.exact_arrays import cast_exactly
from onceflow.core.arrow.kinds import cast_rows, holds, is_list, is_text, to_plain_type
from onceflow.core.errors import ConfigError
from onceflow.core.imports import naming_extras
from onceflow.formats.avro.schema import (
    MISSING,
    AvroType,
    Entries,
    Items,
    Record,
    Symbols,
    Union,
    arrow_type,
    parse_avro,
    record_of,
    values_of,
)
from onceflow.formats.faulty_parts import ENCODING_ERRORS, find_faulty_part
from onceflow.formats.fitting import misfit
from onceflow.formats.registry_schemas import check_fields

_VALUE = "value"


class AvroValues:
    """An encoder of rows of some columns by one schema."""

    def __init__(self, columns: pa.Schema, text: str) -> None:
        """Prepare to write `columns` by the schema `text`.

        Raises:
            ConfigError: A column is not in the schema, or its field cannot hold its type; or a
                field has neither a column nor a default.
            MissingExtra: fastavro is not installed.
        """
        with naming_extras():
            import fastavro
            from fastavro.schema import SchemaParseException
        record = record_of(parse_avro(text), what="the subject's schema")
        fields = record.members
        check_fields(
            columns.names,
            [field.name for field in fields],
            [field.name for field in fields if field.default is MISSING],
            "the subject's schema",
        )
        named: dict[str, Any] = {}
        try:
            self._schema: Any = cast("Any", fastavro).parse_schema(json.loads(text), named)
        except SchemaParseException as error:
            raise ConfigError(f"nothing can be written by the subject's schema: {error}") from error
        self._write = cast("Callable[..., None]", cast("Any", fastavro).schemaless_writer)
        member_types = {field.name: field.type for field in fields}
        self._fitted = [
            resolve_written_type(column.type, member_types[column.name], f"column {column.name!r}")
            for column in columns
        ]
        self._types = list(map(_numbers, self._fitted))
        self._names = columns.names
        types = pa.struct([column.with_type(to_plain_type(column.type)) for column in columns])
        self._mark = find_marks(types, record, self._schema, named)

    def encode(self, columns: Sequence[pa.Array], header: bytes) -> list[bytes]:
        """Return one record for each row, each after `header`.

        Raises:
            ValueError: A value does not fit the schema. Also raises the others of
                `ENCODING_ERRORS`. If there is one row, the error names the part at fault.
        """
        try:
            return self._encode(columns, header)
        except (*ENCODING_ERRORS, LookupError) as error:
            fields = list(map(pa.field, self._names, self._fitted))
            raise find_faulty_part(columns, fields, _convert_part, error) from error

    def _encode(self, columns: Sequence[pa.Array], header: bytes) -> list[bytes]:
        # Cast to the schema's own types first. Otherwise fastavro changes 99.99 to 99 for an int
        # and 1e39 to infinity for a float, and writes an instant's number in the wrong unit.
        fitted = map(cast_exactly, columns, self._fitted)
        batch = pa.RecordBatch.from_arrays(
            [_as_numbers(column, kind) for column, kind in zip(fitted, self._types, strict=True)],
            names=self._names,
        )
        encoded: list[bytes] = []
        stream = io.BytesIO()
        for plain in batch.to_pylist(maps_as_pydicts="strict"):
            row = plain if self._mark is None else self._mark(plain)
            stream.seek(0)
            stream.truncate()
            stream.write(header)
            self._write(stream, self._schema, row)
            encoded.append(stream.getvalue())
        return encoded


def _convert_part(column: pa.Array, kind: pa.DataType) -> list[Any]:
    numbers = _as_numbers(cast_exactly(column, kind), _numbers(kind))
    try:
        values: list[Any] = numbers.to_pylist(maps_as_pydicts="strict")
    except KeyError as error:
        raise ValueError("a map that has a key twice") from error
    return values


def avro_value(columns: pa.Schema, text: str) -> AvroValues:
    """Return an encoder of the only column by `text`, which describes the value or a record of it.

    A record of one field has the same encoding as that field.

    Raises:
        ConfigError: See `AvroValues`.
    """
    if isinstance(parse_avro(text), Record):
        return AvroValues(columns, text)
    field = {"name": _VALUE, "type": json.loads(text)}
    record = json.dumps({"type": "record", "name": "onceflow_value", "fields": [field]})
    return AvroValues(pa.schema([columns.field(0).with_name(_VALUE)]), record)


def resolve_written_type(kind: pa.DataType, node: AvroType, where: str) -> pa.DataType:
    """Return the type to which values of `kind` are cast to be written as `node`.

    Raises:
        ConfigError: No value of `kind` can be written as `node`. The message names the column,
            `where`.
    """
    kind = to_plain_type(kind)
    fitted = _find_written_type(kind, node, where)
    if fitted is None:
        raise ConfigError(
            f"{where} is {kind}, and the subject's schema has {arrow_type(node)} there: cast the"
            " column before the sink, or register a schema with its type"
        )
    return fitted


def _find_written_type(kind: pa.DataType, node: AvroType, where: str) -> pa.DataType | None:
    if isinstance(node, Union):
        return _branch_type(kind, node, where)
    if isinstance(node, Record) and arrow.is_struct(kind):
        inside = {member.name: member.type for member in node.members}
        fields = [kind.field(at) for at in range(kind.num_fields)]
        if not inside.keys() >= {field.name for field in fields}:
            return None
        return pa.struct(
            [_refit(child, inside[child.name], f"{where}, {child.name!r}") for child in fields]
        )
    if isinstance(node, Items) and is_list(kind):
        return pa.list_(_refit(kind.value_field, node.item, where))
    if isinstance(node, Entries) and arrow.is_map(kind) and is_text(kind.key_type):
        return pa.map_(pa.string(), _refit(kind.item_field, node.value, where))
    return None if isinstance(node, Record | Items | Entries) else _find_plain_type(kind, node)


def _find_plain_type(kind: pa.DataType, node: AvroType) -> pa.DataType | None:
    fitted = arrow_type(node)
    # A double is rounded to a float, as in the results of functions.
    is_rounded = arrow.is_float64(kind) and arrow.is_float32(fitted)
    return fitted if is_rounded or misfit(kind, fitted) is None else None


def _refit(field: pa.Field, node: AvroType, where: str) -> pa.Field:
    return field.with_type(resolve_written_type(field.type, node, where))


def _branch_type(kind: pa.DataType, union: Union, where: str) -> pa.DataType:
    if arrow.is_null(kind) or not values_of(union):
        return pa.null()
    return _choose_branch(kind, union, where)[1]


def _choose_branch(kind: pa.DataType, union: Union, where: str) -> tuple[AvroType, pa.DataType]:
    """Return the branch to write, and its type: the column's own type, or else the first that fits.

    Raises:
        ConfigError: No branch fits.
    """
    choices: list[tuple[AvroType, pa.DataType]] = []
    refusal = ConfigError(f"{where} is {kind}, and the subject's schema has no such branch there")
    for branch in values_of(union):
        try:
            choices.append((branch, resolve_written_type(kind, branch, where)))
        except ConfigError as error:
            refusal = error
    if not choices:
        raise refusal
    # Any text fits a string, but only few texts are symbols.
    return min(choices, key=lambda choice: (choice[1] != kind, isinstance(choice[0], Symbols)))


_Mark: TypeAlias = Callable[[Any], Any]
"""A function that marks a value, and those inside it, with the branches of their unions, for
fastavro.
"""
_NAMED = ("record", "error", "enum", "fixed")


def find_marks(
    kind: pa.DataType, node: AvroType, schema: Any, named: Mapping[str, Any]
) -> _Mark | None:
    """Return a function that marks values of `kind` for `node`; None if no union leaves a choice.

    Without a mark, fastavro chooses the branch by the value: a long becomes a float, and a number
    becomes the day of another branch.

    Args:
        kind: The plain type of a column.
        node: The Avro type that its values are written as.
        schema: The same type, as a schema of fastavro.
        named: The named types, as fastavro stores them.
    """
    schema = named.get(schema, schema) if isinstance(schema, str) else schema
    mark: _Mark | None = None
    kind = to_plain_type(kind)
    if isinstance(node, Union):
        return _find_branch_mark(kind, node, schema, named)
    if isinstance(node, Record):
        return _find_member_marks(kind, node, schema, named)
    if isinstance(node, Items):
        item = find_marks(kind.value_type, node.item, schema["items"], named)
        mark = item and (lambda values: list(map(item, values)))
    elif isinstance(node, Entries):
        entry = find_marks(kind.item_type, node.value, schema["values"], named)
        mark = entry and (lambda values: {key: entry(value) for key, value in values.items()})
    return mark and _unless_null(mark)


def _find_branch_mark(
    kind: pa.DataType, union: Union, schema: Any, named: Mapping[str, Any]
) -> _Mark | None:
    if arrow.is_null(kind) or not values_of(union):
        return None
    branch, _ = _choose_branch(kind, union, "")
    chosen = schema[union.branches.index(branch)]
    inside = find_marks(kind, branch, chosen, named)
    if len(values_of(union)) == 1:
        return inside
    name = chosen
    if not isinstance(chosen, str):
        name = chosen["name"] if chosen["type"] in _NAMED else chosen["type"]
    return _unless_null(lambda value: (name, inside(value) if inside else value))


def _find_member_marks(
    kind: pa.DataType, record: Record, schema: Any, named: Mapping[str, Any]
) -> _Mark | None:
    fields = {field["name"]: field["type"] for field in schema["fields"]}
    nodes = {member.name: member.type for member in record.members}
    marks_or_none = {
        child.name: find_marks(child.type, nodes[child.name], fields[child.name], named)
        for child in kind
    }
    marks = {name: mark for name, mark in marks_or_none.items() if mark is not None}
    if not marks:
        return None
    return _unless_null(
        lambda row: {**row, **{name: mark(row[name]) for name, mark in marks.items()}}
    )


def _unless_null(mark: _Mark) -> _Mark:
    return lambda value: None if value is None else mark(value)


def _numbers(kind: pa.DataType) -> pa.DataType:
    """Return the type to which a column is cast before it is written as numbers."""
    if arrow.is_dictionary(kind):
        return _numbers(kind.value_type)
    if arrow.is_timestamp(kind):
        return pa.timestamp("ms" if kind.unit == "s" else kind.unit, kind.tz)
    if arrow.is_time32(kind):
        return pa.time32("ms")
    if arrow.is_time64(kind):
        return pa.time64("us")
    return pa.date32() if arrow.is_date(kind) else kind


def _as_numbers(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type != kind:
        column = cast_rows(column, kind)
    if arrow.is_timestamp(kind) or arrow.is_time64(kind):
        return column.view(pa.int64())
    if arrow.is_date32(kind) or arrow.is_time32(kind):
        return column.view(pa.int32())
    if arrow.is_nested(kind) and holds(kind, arrow.is_temporal):
        return cast_rows(column, _integers(kind))
    return column


def _integers(kind: pa.DataType) -> pa.DataType:
    """Return `kind` with integers instead of inner dates and times: fastavro has no nanoseconds."""
    if is_list(kind):
        return pa.list_(kind.value_field.with_type(_integers(kind.value_type)))
    if arrow.is_map(kind):
        return pa.map_(kind.key_type, kind.item_field.with_type(_integers(kind.item_type)))
    if arrow.is_struct(kind):
        return pa.struct([field.with_type(_integers(field.type)) for field in kind])
    if arrow.is_date32(kind) or arrow.is_time32(kind):
        return pa.int32()
    return pa.int64() if arrow.is_temporal(kind) else kind
