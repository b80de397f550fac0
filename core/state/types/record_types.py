"""The Python type of a stream's records, for states that keep whole records.

A record is kept as a mapping by column name. Each value has the type of its column, so decimals,
dates and times are restored exactly. Records older than a new column do not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import GenericAlias
from typing import Any, TypeAlias, TypedDict, cast

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.state.types.serializers import python_type_of

Restore: TypeAlias = Callable[[Any], Any]


def record_type(schema: pa.Schema, whose: str) -> Any:
    """Return the type of records of `schema`. `whose` names their owner in errors.

    Raises:
        ConfigError: Values of a column cannot be kept; names the column.
    """
    types: dict[str, Any] = {}
    for field in schema:
        try:
            types[field.name] = value_type(field.type)
        except ConfigError as error:
            raise explain_not_kept(field, whose, error) from error
    return _mapping(types)


def explain_not_kept(field: pa.Field, whose: str, error: ConfigError) -> ConfigError:
    """Return the error for a column whose values cannot be kept, for the reason `error`."""
    return ConfigError(
        f"{whose} keeps its records, but values of column {field.name!r}, {field.type}, cannot be"
        f" kept ({error}). Cast or drop the column before it"
    )


def value_type(kind: pa.DataType) -> Any:
    """Return the Python type of values of an Arrow type in records.

    Raises:
        ConfigError: Values of `kind` cannot be kept.
    """
    if pa.types.is_struct(kind):
        inner: Any = _mapping({field.name: value_type(field.type) for field in kind})
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = GenericAlias(list, (value_type(kind.value_type),))
    elif pa.types.is_map(kind):
        # Arrow's arrays return maps as lists of pairs.
        pair = GenericAlias(tuple, (value_type(kind.key_type), value_type(kind.item_type)))
        inner = GenericAlias(list, (pair,))
    elif pa.types.is_dictionary(kind):
        return value_type(kind.value_type)
    elif pa.types.is_null(kind):
        return type(None)
    elif pa.types.is_temporal(kind) and getattr(kind, "unit", "") == "ns":
        raise ConfigError("Python has no nanoseconds: use microseconds")
    else:
        inner = python_type_of(kind)
    return inner | None


def restore_zones(schema: pa.Schema) -> dict[str, Restore]:
    """Return functions that restore the time zones of values, by the column's name.

    A state holds points in time in UTC. Arrow's arrays return them in their column's zone, which
    determines hours and days. Columns without a zone are left out.
    """
    restores = {field.name: _restore_zone(field.type) for field in schema}
    return {name: restore for name, restore in restores.items() if restore is not None}


def _restore_zone(kind: pa.DataType) -> Restore | None:
    """Return a function that restores the zones in a value of `kind`, or None without zones."""
    types = pa.types
    if types.is_dictionary(kind):
        return _restore_zone(kind.value_type)
    if types.is_timestamp(kind) and kind.tz not in (None, "UTC"):
        zone = pa.scalar(0, kind).as_py().tzinfo
        return lambda at: None if at is None else at.astimezone(zone)
    if types.is_struct(kind):
        fields = restore_zones(pa.schema(list(kind)))
        return _restore_fields(fields) if fields else None
    if types.is_map(kind):
        return _restore_each(_restore_pair(kind.key_type, kind.item_type))
    if types.is_list(kind) or types.is_large_list(kind):
        return _restore_each(_restore_zone(kind.value_type))
    return None


def _restore_fields(fields: dict[str, Restore]) -> Restore:
    def restore(value: Any) -> Any:
        if value is None:
            return None
        # Fields may be newer than the value.
        return value | {
            name: restore_field(value[name])
            for name, restore_field in fields.items()
            if name in value
        }

    return restore


def _restore_each(restore: Restore | None) -> Restore | None:
    if restore is None:
        return None
    return lambda values: None if values is None else [restore(value) for value in values]


def _restore_pair(key_type: pa.DataType, item_type: pa.DataType) -> Restore | None:
    key, item = _restore_zone(key_type), _restore_zone(item_type)
    if key is item is None:
        return None

    def restore(pair: tuple[Any, Any]) -> tuple[Any, Any]:
        return key(pair[0]) if key else pair[0], item(pair[1]) if item else pair[1]

    return restore


def _mapping(types: dict[str, Any]) -> Any:
    make = cast("Any", TypedDict)
    return make("record", types, total=False)
