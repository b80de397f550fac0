"""Copies of what functions return, taken at once: the function may change it afterwards.

A generator may yield one dict again and again, and a function may return a list that it keeps. What
counts is what such a value holds when it is yielded or returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from onceflow.core.api.functions import Record


def copy_value(value: Any) -> Any:
    """Return `value`, with every list, dict, set, bytearray and numpy array in it copied."""
    # The exact classes first: nearly all values are of one of them, and `isinstance` with an
    # abstract class is slow.
    kind = value.__class__
    if kind is list or kind is tuple:
        return [copy_value(one) for one in value]
    if kind is dict:
        return {key: copy_value(one) for key, one in value.items()}
    if kind is bytearray:
        return bytes(value)
    if isinstance(value, (list, set)):
        return [copy_value(one) for one in cast("Iterable[Any]", value)]
    if isinstance(value, Mapping):
        return {key: copy_value(one) for key, one in _items_of(value)}
    # numpy arrays; scalars of numpy, which have it too, are cheap to copy.
    return value.copy() if hasattr(value, "__array__") and hasattr(value, "copy") else value


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    items: Iterable[tuple[Any, Any]] = value.items()
    return items


def copy_records(result: Record | Iterable[Record] | None) -> Iterator[Record]:
    """Yield a copy of each record that a function has returned, or yields, as it comes."""
    if isinstance(result, Mapping):
        yield copy_value(result)
    elif result is not None:
        yield from map(copy_value, result)
