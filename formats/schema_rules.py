"""The rules that schemas of a registry set for columns, in any schema language."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import TypeVar

import pyarrow as pa

from onceflow.core.arrow.kinds import IsKind, find_kind
from onceflow.core.errors import ConfigError

_T = TypeVar("_T")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def to_schema_name(subject: str) -> str:
    """Return a valid schema name for `subject`: letters, digits and _."""
    return re.sub(r"[^A-Za-z0-9_]", "_", subject)


def check_field_name(name: str, language: str, path: str) -> None:
    """Raise ConfigError if a field may not be called `name`. Errors show `path` before the name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"column {path + name!r} has a name that {language} does not allow: letters, digits"
            " and _, beginning with a letter or _; rename it before the sink"
        )


def require_kind(
    kind: pa.DataType, table: Iterable[tuple[IsKind, _T]], column: str, language: str
) -> _T:
    """Return the entry in `table` for `kind`.

    Raises:
        ConfigError: There is no entry.
    """
    entry = find_kind(kind, table)
    if entry is None:
        raise ConfigError(f"column {column!r} is {kind}, which {language} does not have: cast it")
    return entry


def check_fields(
    columns: Collection[str], fields: Collection[str], required: Collection[str], what: str
) -> None:
    """Raise ConfigError unless `columns` are among `fields` and include all `required` ones.

    Errors name `what`, the owner of the fields.
    """
    lost = sorted(set(columns) - set(fields))
    if lost:
        raise ConfigError(
            f"{what} has no fields for columns {lost}: drop them before the sink, or register a"
            " version that has them"
        )
    missing = sorted(set(required) - set(columns))
    if missing:
        raise ConfigError(
            f"{what} requires fields {missing}, which the rows do not have: add the columns, or"
            " register a version that does not require them"
        )
