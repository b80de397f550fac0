"""The exact reading of JSON instants finer than microseconds, which decoding rounds.

They become nanoseconds in a column of nanoseconds. A coarser column holds such an instant if the
digits beyond its unit are zeros. Otherwise the record is bad.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import pyarrow as pa
from pyarrow import types

FINER = re.compile(rb":\d\d:\d\d\.\d{7}")
"""A pattern found in every text that contains an instant finer than microseconds."""

_MANY_DIGITS = re.compile(rb"\.\d{7}")
"""A pattern that matches wherever `FINER` does, and in other numbers of many digits.

It is several times as fast.
"""
_INSTANT = re.compile(r"(.+:\d\d:\d\d)\.(\d{7,})(.*)", re.DOTALL)
_EPOCH = dt.datetime(1970, 1, 1)


def any_finer(texts: Sequence[bytes | None]) -> bool:
    """Return True if one of `texts` contains an instant finer than microseconds."""
    try:
        whole = b"\n".join(cast("Sequence[bytes]", texts))
    except TypeError:
        whole = b"\n".join(text for text in texts if text is not None)
    return _MANY_DIGITS.search(whole) is not None and FINER.search(whole) is not None


def holds_instants(kind: pa.DataType) -> bool:
    """Return True if values of the type are instants, or may contain instants."""
    if types.is_dictionary(kind):
        return holds_instants(kind.value_type)
    inner = (kind.field(index).type for index in range(kind.num_fields))
    return types.is_timestamp(kind) or any(map(holds_instants, inner))


def make_exact(record: Any, written: object, columns: pa.Schema) -> None:
    """Set the instants of `record`, which was decoded from `written`, to their exact values.

    Raises:
        ValueError: A column cannot hold an instant. The message names the column.
    """
    if not isinstance(written, dict):
        return
    fields = cast("dict[str, Any]", written)
    for index, column in enumerate(columns):
        if holds_instants(column.type):
            value = getattr(record, f"c{index}")
            try:
                exact = _exact(value, fields.get(column.name), column.type)
            except ValueError as error:
                raise ValueError(f"column {column.name!r} ({column.type}): {error}") from None
            setattr(record, f"c{index}", exact)


def _exact(value: Any, written: Any, kind: pa.DataType) -> Any:
    """Return the exact value of `written` if `value` was rounded, else `value`."""
    if types.is_dictionary(kind):
        return _exact(value, written, kind.value_type)
    if isinstance(value, dt.datetime):
        finer = _INSTANT.fullmatch(written) if isinstance(written, str) else None
        return value if finer is None else _read_instant(finer, written, kind)
    if types.is_list(kind) or types.is_large_list(kind):
        pairs = zip(value or (), written or (), strict=True)
        return value and [_exact(item, text, kind.value_type) for item, text in pairs]
    if types.is_map(kind) and value:
        return {key: _exact(entry, written[key], kind.item_type) for key, entry in value.items()}
    if types.is_struct(kind) and isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        fields = {field.name: field.type for field in map(kind.field, range(kind.num_fields))}
        return {
            name: _exact(member, written.get(name), fields[name])
            for name, member in mapping.items()
        }
    return value


def _read_instant(finer: re.Match[str], written: str, kind: pa.DataType) -> dt.datetime | int:
    moment, digits, zone = finer.groups()
    whole = msgspec.convert(f"{moment}.{digits[:6]}{zone}", dt.datetime)
    finer_digits = digits[6:].rstrip("0")
    if not finer_digits:
        return whole
    if kind.unit != "ns" or len(finer_digits) > 3:
        raise ValueError(f"{written} is finer than the column's unit, {kind.unit}")
    if whole.tzinfo is not None:
        whole = whole.astimezone(dt.timezone.utc).replace(tzinfo=None)
    since = whole - _EPOCH
    microseconds = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return microseconds * 1_000 + int(finer_digits.ljust(3, "0"))
