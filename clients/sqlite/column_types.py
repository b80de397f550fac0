"""The types of columns that SQLite creates for Arrow's. Imports SQLAlchemy."""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects.sqlite.base import SQLiteDialect as SQLiteCompiler
from sqlalchemy.engine import Dialect as Compiler
from sqlalchemy.types import TypeEngine

from onceflow.clients.sqlite.types import find_storage
from onceflow.core.arrow.kinds import to_plain_type

_TYPES: dict[pa.DataType, TypeEngine[Any]] = {
    pa.int64(): sa.Integer(),
    pa.float64(): sa.REAL(),
    pa.large_binary(): sa.BLOB(),
    pa.large_string(): sa.Text(),
}


def column_type(field: pa.Field) -> TypeEngine[Any] | None:
    """Return the type of a column that is created for `field`, or None if there is none."""
    kept = find_storage(to_plain_type(field.type))
    return _TYPES[kept.wire] if kept else None


def compiler() -> Compiler:
    """Return the SQLAlchemy dialect that writes SQLite's text."""
    made: Compiler = cast("Any", SQLiteCompiler)(paramstyle="named")
    return made
