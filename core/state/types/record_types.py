"""The Python type of a stream's records, for states that keep whole records.

A record is kept as a mapping by column name. Each value has the type of its column, so decimals,
dates and times read back as they were. Records from before a column was added are without it.
"""

from __future__ import annotations

from types import GenericAlias
from typing import Any, TypedDict, cast

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.state.types.serializers import python_type_of


def record_type(schema: pa.Schema, whose: str) -> Any:
    """Return the type of records of `schema`; `whose` they are is for errors.

    Raises:
        ConfigError: Values of a column cannot be kept; names it.
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
        f"{whose} keeps its records, and values of column {field.name!r}, {field.type}, cannot be"
        f" kept ({error}); cast or drop the column before"
    )


def value_type(kind: pa.DataType) -> Any:
    """Return the Python type of values of an Arrow type in records.

    Raises:
        ConfigError: They cannot be kept.
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


def _mapping(types: dict[str, Any]) -> Any:
    make = cast("Any", TypedDict)
    return make("record", types, total=False)
