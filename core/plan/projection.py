"""The selection and renaming of columns, without SQL where no expression is computed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.plan.sql_functions import QueryFunction, quote
from onceflow.core.plan.stream_sql import select_columns
from onceflow.core.plan.work import MapBatches, SelectSql

_NAME = r'(?:"((?:[^"]|"")+)"|([^\W\d]\w*))'
_PLAIN = re.compile(rf"\s*{_NAME}(?:\s+AS\s+{_NAME})?\s*", re.IGNORECASE)
"""A column, and the name that it gets: `price`, `price AS bid`, `"a b" AS c`."""


@dataclass(frozen=True, slots=True)
class _Select:
    """The columns of a stream that a projection keeps, with the names that they get."""

    columns: tuple[str, ...]
    schema: pa.Schema

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = [rows.column(name) for name in self.columns]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def plan_projection(
    items: Sequence[str], stream: pa.Schema, functions: Mapping[str, QueryFunction], owner: str
) -> tuple[MapBatches | SelectSql, pa.Schema]:
    """Return the work that computes `items` from the rows of `stream`, and its schema.

    An item is `*`, a column, or an expression in SQL, with a name (`amount / 100.0 AS euros`).

    Raises:
        ConfigError: There is no item, an item is invalid, or two columns get the same name.
    """
    if not items:
        raise ConfigError(f"{owner} needs at least one column")
    selected = rename_columns(items, stream)
    if selected is None:
        sql = select_columns([_quote_column(item, stream) for item in items], stream, functions)
        schema = sql.resolve_schema()
        work: MapBatches | SelectSql = SelectSql(sql)
    else:
        schema = pa.schema([stream.field(column).with_name(name) for column, name in selected])
        work = MapBatches(_Select(tuple(column for column, _ in selected), schema))
    require_different(schema.names, owner)
    return work, schema


def _quote_column(item: str, stream: pa.Schema) -> str:
    """Return `item` with quoted names if it is a column, or else as it is.

    In SQL some names, such as `current_date`, are functions unless they are quoted.
    """
    pairs = None if item.strip() == "*" else rename_columns([item], stream)
    if pairs is None:
        return item
    [(column, name)] = pairs
    return f"{quote(column)} AS {quote(name)}"


def require_different(names: Sequence[str], owner: str) -> None:
    """Raise ConfigError if two columns have the same name."""
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ConfigError(f"{owner}: two columns get the name {double!r}; rename one with AS")


def rename_columns(items: Sequence[str], stream: pa.Schema) -> list[tuple[str, str]] | None:
    """Return pairs of a column and its new name, or None if an item is more than a column."""
    pairs: list[tuple[str, str]] = []
    for item in items:
        match = _PLAIN.fullmatch(item)
        if item.strip() == "*":
            pairs += [(name, name) for name in stream.names]
        elif match is None:
            return None
        else:
            column = _unquote(match[1]) or match[2]
            if column not in stream.names:
                return None
            pairs.append((column, _unquote(match[3]) or match[4] or column))
    return pairs


def _unquote(quoted: str | None) -> str | None:
    return None if quoted is None else quoted.replace('""', '"')
