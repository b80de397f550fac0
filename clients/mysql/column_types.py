"""The types of columns that MySQL creates for Arrow's. Imports SQLAlchemy."""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa
import sqlalchemy as sa
from pyarrow import types as arrow
from sqlalchemy.dialects import mysql
from sqlalchemy.dialects.mysql.base import MySQLDialect as MySQLCompiler
from sqlalchemy.engine import Dialect as Compiler
from sqlalchemy.types import TypeEngine

from onceflow.clients.mysql.catalog import CHARSET, KEY_COLLATION
from onceflow.core.arrow.kinds import is_bytes, is_text, to_plain_type

_SqlType = TypeEngine[Any]
# An index can have 3072 bytes: three key columns of this many characters.
_KEY_LENGTH = 255
_BINARY_LENGTH_MAX = 255
_DECIMAL_PRECISION_MAX, _DECIMAL_SCALE_MAX = 65, 30
_TYPES: dict[pa.DataType, _SqlType] = {
    pa.bool_(): sa.Boolean(),
    pa.int8(): mysql.TINYINT(),
    pa.int16(): mysql.SMALLINT(),
    pa.int32(): mysql.INTEGER(),
    pa.int64(): mysql.BIGINT(),
    pa.uint8(): mysql.TINYINT(unsigned=True),
    pa.uint16(): mysql.SMALLINT(unsigned=True),
    pa.uint32(): mysql.INTEGER(unsigned=True),
    pa.uint64(): mysql.BIGINT(unsigned=True),
    pa.float16(): mysql.FLOAT(),
    pa.float32(): mysql.FLOAT(),
    pa.float64(): mysql.DOUBLE(),
    pa.date32(): sa.Date(),
    pa.date64(): sa.Date(),
}


def compiler() -> Compiler:
    """Return the SQLAlchemy dialect that writes the text of CREATE and ALTER."""
    # In another parameter style each % of a name would be doubled.
    made: Compiler = cast("Any", MySQLCompiler)(paramstyle="named")
    return made


def column_type(field: pa.Field, *, is_key: bool) -> _SqlType | None:
    """Return the type of a column that is created for `field`, or None if there is none."""
    given = to_plain_type(field.type)
    key_type = _key_type(given) if is_key else None
    return key_type or _TYPES.get(given) or _other_type(given)


def _key_type(given: pa.DataType) -> _SqlType | None:
    if is_text(given):
        return mysql.VARCHAR(_KEY_LENGTH, charset=CHARSET, collation=KEY_COLLATION)
    if is_bytes(given) and not arrow.is_fixed_size_binary(given):
        return mysql.VARBINARY(_KEY_LENGTH)
    return None


def _other_type(given: pa.DataType) -> _SqlType | None:
    if is_bytes(given):
        fixed = arrow.is_fixed_size_binary(given) and given.byte_width <= _BINARY_LENGTH_MAX
        return mysql.BINARY(given.byte_width) if fixed else mysql.LONGBLOB()
    if arrow.is_timestamp(given):
        return mysql.TIMESTAMP(fsp=6) if given.tz else mysql.DATETIME(fsp=6)
    if arrow.is_decimal(given):
        # A negative scale in Arrow means zeros before the point.
        precision, scale = given.precision - min(given.scale, 0), max(given.scale, 0)
        fits = precision <= _DECIMAL_PRECISION_MAX and scale <= _DECIMAL_SCALE_MAX
        return mysql.DECIMAL(precision, scale) if fits else None
    if is_text(given):
        return mysql.LONGTEXT()
    return mysql.TIME(fsp=6) if arrow.is_time(given) else None
