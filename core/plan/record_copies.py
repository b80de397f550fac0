"""The copies of records that functions return or yield.

A generator may yield the same dict repeatedly, and a function may keep and change a list that it
returned. A copy keeps the values that the record had when it was returned or yielded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from onceflow.core.plan.functions import Record


def copy_value(value: Any) -> Any:
    """Return a copy of `value`, with copies of all lists, dicts, sets, bytearrays and arrays."""
    # Test for the exact classes first. Most values have one of them, and `isinstance` with an
    # abstract class is slow.
    kind = value.__class__
    if kind is list or kind is tuple:
        return [copy_value(element) for element in value]
    if kind is dict:
        return {key: copy_value(item) for key, item in value.items()}
    if kind is bytearray:
        return bytes(value)
    if isinstance(value, (list, set)):
        return [copy_value(element) for element in cast("Iterable[Any]", value)]
    if isinstance(value, Mapping):
        return {key: copy_value(item) for key, item in _items_of(value)}
    # numpy arrays. numpy scalars also have these attributes and are cheap to copy.
    return value.copy() if hasattr(value, "__array__") and hasattr(value, "copy") else value


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    items: Iterable[tuple[Any, Any]] = value.items()
    return items


def copy_records(result: Record | Iterable[Record] | None) -> Iterator[Record]:
    """Yield a copy of each record of a function's result, at the time the function yields it."""
    if isinstance(result, Mapping):
        yield copy_value(result)
    elif result is not None:
        yield from map(copy_value, result)
