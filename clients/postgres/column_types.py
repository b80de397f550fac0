"""The types of columns that Postgres creates for Arrow's. Imports SQLAlchemy."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import pyarrow as pa
import sqlalchemy as sa
from pyarrow import types as arrow
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.engine import Dialect as Compiler
from sqlalchemy.types import TypeEngine

from onceflow.clients.postgres.types import DECIMAL_PRECISION_MAX
from onceflow.core.arrow.kinds import is_bytes, is_text, to_plain_type

_SqlType = TypeEngine[Any]
_TYPES: Mapping[pa.DataType, _SqlType] = MappingProxyType(
    {
        pa.int8(): sa.SmallInteger(),
        pa.int16(): sa.SmallInteger(),
        pa.int32(): sa.Integer(),
        pa.int64(): sa.BigInteger(),
        pa.uint8(): sa.SmallInteger(),
        pa.uint16(): sa.Integer(),
        pa.uint32(): sa.BigInteger(),
        # The maximum of bigint is half that of uint64.
        pa.uint64(): sa.Numeric(20, 0),
        pa.bool_(): sa.Boolean(),
        pa.float16(): postgresql.REAL(),
        pa.float32(): postgresql.REAL(),
        pa.float64(): postgresql.DOUBLE_PRECISION(),
        pa.date32(): sa.Date(),
        pa.date64(): sa.Date(),
    }
)


def compiler() -> Compiler:
    """Return the SQLAlchemy dialect that writes the text of CREATE and ALTER."""
    # In another parameter style each % of a name would be doubled.
    made: Compiler = cast("Any", PGDialect)(paramstyle="named")
    return made


def column_type(field: pa.Field) -> _SqlType | None:
    """Return the type of a column that is created for `field`, or None if there is none."""
    given = to_plain_type(field.type)
    if isinstance(field.type, pa.UuidType):
        return postgresql.UUID()
    array = _scalar_type(given)
    if array is None and (arrow.is_list(given) or arrow.is_large_list(given)):
        element = _element_type(given.value_type)
        array = None if element is None else postgresql.ARRAY(element)
    return array


def _element_type(given: pa.DataType) -> _SqlType | None:
    """Return the type of an array's elements, or None if rows could not be written to it."""
    return None if arrow.is_duration(given) else _scalar_type(given)


def _scalar_type(given: pa.DataType) -> _SqlType | None:
    known = _TYPES.get(given)
    if known is not None:
        return known
    if is_text(given):
        return sa.Text()
    if arrow.is_timestamp(given):
        return sa.DateTime(timezone=given.tz is not None)
    if arrow.is_decimal(given) and given.precision <= DECIMAL_PRECISION_MAX:
        # A negative scale in Arrow means zeros before the point.
        return sa.Numeric(given.precision - min(given.scale, 0), max(given.scale, 0))
    for is_kind, made in (
        (is_bytes, postgresql.BYTEA()),
        (arrow.is_time, sa.Time()),
        (arrow.is_duration, postgresql.INTERVAL()),
    ):
        if is_kind(given):
            return cast("_SqlType", made)
    return None
