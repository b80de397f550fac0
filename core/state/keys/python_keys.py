"""The key columns of a batch as the Python values that functions by record get as keys.

All operators convert their keys here, so a key has the same value for each operator and backend,
and after each restore. Each value equals `decode_key(encode_key(value))`:

    timestamps with a zone       datetimes in UTC: in their own zone, the two instants that a
                                 clock shows twice in autumn would be equal
    timestamps without a zone    datetimes
    other types                  the result of `to_pylist`
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.errors import BadStateValue

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_MICROSECONDS = 10**6
_EPOCH = datetime(1970, 1, 1)


def _microseconds_since_1970(instant: datetime) -> int:
    since = instant - _EPOCH
    return (since.days * 86_400 + since.seconds) * _MICROSECONDS + since.microseconds


_FIRST_US = _microseconds_since_1970(datetime.min)
_LAST_US = _microseconds_since_1970(datetime.max)


def has_own_python_keys(kind: pa.DataType) -> bool:
    """Return True if keys of a column of `kind` differ from the values that `to_pylist` returns."""
    if pa.types.is_dictionary(kind):
        return has_own_python_keys(kind.value_type)
    return pa.types.is_timestamp(kind)


def python_keys(column: pa.Array, name: str) -> list[Any]:
    """Return the key of each row of one key column, which has no nulls.

    Raises:
        BadStateValue: A timestamp has nanoseconds, or is outside of the years 1 to 9999; names the
            row.
    """
    if pa.types.is_dictionary(column.type):
        return python_keys(column.dictionary_decode(), name)
    if not pa.types.is_timestamp(column.type):
        return column.to_pylist()
    ticks: npt.NDArray[np.int64] = column.view(pa.int64()).to_numpy()
    microseconds = _as_microseconds(ticks, column.type, name)
    instants = cast("list[datetime]", microseconds.view("datetime64[us]").tolist())
    if column.type.tz is None:
        return instants
    return [instant.replace(tzinfo=timezone.utc) for instant in instants]


def _as_microseconds(
    ticks: npt.NDArray[np.int64], kind: pa.DataType, name: str
) -> npt.NDArray[np.int64]:
    ticks_a_second = _PER_SECOND[kind.unit]
    if ticks_a_second > _MICROSECONDS:
        microseconds = ticks // 1000
        _check_rows(ticks == microseconds * 1000, ticks, kind, name, "has nanoseconds")
    else:
        factor = _MICROSECONDS // ticks_a_second
        # Compared before the multiplication, which could overflow. -(-a // b) rounds up.
        within = (ticks >= -(-_FIRST_US // factor)) & (ticks <= _LAST_US // factor)
        _check_rows(within, ticks, kind, name, "is outside of the years 1 to 9999")
        microseconds = ticks * factor
    return microseconds


def _check_rows(
    fine: npt.NDArray[np.bool_],
    ticks: npt.NDArray[np.int64],
    kind: pa.DataType,
    name: str,
    reason: str,
) -> None:
    """Raise BadStateValue unless every row is `fine`."""
    if fine.all():
        return
    row = int(np.flatnonzero(~fine)[0])
    raise BadStateValue(
        f"key column {name!r} holds {int(ticks[row])} {kind.unit} since 1970 ({kind}), which"
        f" {reason}: Python has no datetime for it, which a function by record needs as its key;"
        " cast the column to another type, or filter such records, before key_by()",
        row=row,
    )


def python_row_keys(columns: Sequence[pa.Array], names: Sequence[str]) -> list[Any]:
    """Return each row's key: the value of one key column, or a tuple of several.

    Raises:
        BadStateValue: See `python_keys`.
    """
    values = [python_keys(column, name) for column, name in zip(columns, names, strict=True)]
    return values[0] if len(values) == 1 else list(zip(*values, strict=True))
