"""Copies of mutable objects, and codes that are equal for equal content.

A process of a world holds objects of production. The explorer copies a process before each step,
and gives each distinct content a number, its *code*. Two processes with the same code behave the
same in all later steps.

    immutable    numbers, texts, enums, functions, errors, frozen dataclasses: shared by copies
    mutable      every other object: copied with all that it refers to

The code of a set or of a mapping does not depend on its order. `search` checks that behaviour does
not depend on this order either: it steps processes with the same code and different orders, and
compares the results.
"""

from __future__ import annotations

from collections import defaultdict, deque
from enum import Enum
from functools import partial
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar

T = TypeVar("T")

_ATOMS = (
    *(int, float, str, bytes, bool, type(None), Enum, type),
    *(FunctionType, BuiltinFunctionType, BaseException, frozenset),
)
_PLAIN = frozenset({int, str, bytes, type(None)})
"""The types whose values are their own codes."""
_is_frozen: dict[type, bool] = {}


def _kind_of(value: object) -> Any:
    return type(value)


def _is_default(kind: type) -> bool:
    return issubclass(kind, defaultdict)


def _is_sequence(kind: type) -> bool:
    return kind in {list, deque}


def _is_mapping(kind: type) -> bool:
    return issubclass(kind, dict)


def is_immutable(value: object) -> bool:
    """Return True if all copies may share `value`."""
    kind = type(value)
    known = _is_frozen.get(kind)
    if known is None:
        frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
        known = _is_frozen[kind] = frozen or issubclass(kind, _ATOMS)
    return known


def copy_of(value: T) -> T:
    """Return a copy of `value`; objects that it refers to twice are copied once."""
    copy: T = _copy(value, {})
    return copy


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    kind = _kind_of(value)
    if kind in _PLAIN or is_immutable(value):
        return value
    if kind is tuple:
        items = [_copy(item, copies) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else tuple(items)
    if (known := copies.get(id(value))) is not None:
        return known
    if kind is set:
        return {_copy(item, copies) for item in value}
    if kind is partial:
        return partial(_copy(value.func, copies), *_copy(value.args, copies))
    if kind is MethodType:
        return MethodType(value.__func__, _copy(value.__self__, copies))
    made: Any
    if _is_sequence(kind):
        copies[id(value)] = made = kind()
        made.extend(_copy(item, copies) for item in value)
        return made
    if _is_mapping(kind):
        copies[id(value)] = made = kind()
        if _is_default(kind):
            made.default_factory = value.default_factory
        for key, item in value.items():
            made[key] = _copy(item, copies)
        return made
    copies[id(value)] = made = object.__new__(kind)
    for name in _slots_of(kind):
        if hasattr(value, name):
            setattr(made, name, _copy(getattr(value, name), copies))
    for name, item in getattr(value, "__dict__", _NO_ATTRIBUTES).items():
        made.__dict__[name] = item if type(item) in _PLAIN else _copy(item, copies)
    return made


_NO_ATTRIBUTES: dict[str, Any] = {}
_names: dict[type, tuple[str, ...]] = {}


def _slots_of(kind: type) -> tuple[str, ...]:
    names = _names.get(kind)
    if names is None:
        declared = [getattr(base, "__slots__", ()) for base in kind.__mro__]
        flat = [n for slots in declared for n in ((slots,) if isinstance(slots, str) else slots)]
        names = _names[kind] = tuple(n for n in flat if n not in {"__weakref__", "__dict__"})
    return names


def attributes_of(value: object) -> list[tuple[str, Any]]:
    """Return each attribute of `value` with its name, in an order that its class determines."""
    pairs = [
        (name, getattr(value, name)) for name in _slots_of(type(value)) if hasattr(value, name)
    ]
    if attributes := getattr(value, "__dict__", None):
        pairs += attributes.items()
    return pairs


class Codes:
    """The code of each content that was met, and one example of it."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._examples: list[Any] = []
        self.others: dict[int, Any] = {}
        """Another object with the same code, for some codes of processes."""
        self._of_frozen: dict[int, tuple[Any, int]] = {}
        """The code of a frozen object by its `id`. The object is kept, so that its id stays its."""

    def __len__(self) -> int:
        return len(self._examples)

    def code(self, value: object) -> int:
        """Return the code of `value`, which must not change any more."""
        key = self._encode(value)
        if (known := self._of_frozen.get(id(value))) is not None:
            return known[1]
        return self._number(("value", key), value)

    def value(self, code: int) -> Any:
        """Return an object with `code`. The caller must not change it."""
        return self._examples[code]

    def _number(self, key: Any, value: object) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._examples)
            self._examples.append(value)
        elif not is_immutable(value):
            self.others[number] = value
        return number

    def _encode(self, value: Any) -> Any:
        kind = _kind_of(value)
        if kind in _PLAIN:
            return value
        if kind in {bool, float}:
            return (kind.__name__, value)
        if kind in {list, tuple, deque}:
            return (kind.__name__, *[v if type(v) in _PLAIN else self._encode(v) for v in value])
        if is_immutable(value):
            return self._encode_immutable(value)
        if kind is set:
            return ("set", *sorted(map(self._encode, value), key=repr))
        if _is_mapping(kind):
            pairs = [(self._encode(key), self._encode(item)) for key, item in value.items()]
            return ("map", *(sorted(pairs, key=repr) if len(pairs) > 1 else pairs))
        if kind is partial:
            return ("partial", self._encode(value.func), *map(self._encode, value.args))
        if kind is MethodType:
            return ("method", value.__func__.__qualname__, self._encode(value.__self__))
        return self._encode_attributes(value)

    def _encode_immutable(self, value: Any) -> Any:
        known = self._of_frozen.get(id(value))
        if known is not None:
            return ("frozen", known[1])
        kind = _kind_of(value)
        if kind is frozenset:
            return ("set", *sorted(map(self._encode, value), key=repr))
        if isinstance(value, Enum):
            return (type(value).__name__, value.name)
        if isinstance(value, BaseException):
            return (type(value).__name__, str(value))
        if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
            return (value.__module__, value.__qualname__)
        known = value, self._number(self._encode_attributes(value), value)
        self._of_frozen[id(value)] = known
        return ("frozen", known[1])

    def _encode_attributes(self, value: object) -> Any:
        pairs = attributes_of(value)
        encode = self._encode
        parts = [(name, v if type(v) in _PLAIN else encode(v)) for name, v in pairs]
        if hasattr(value, "__dict__"):
            parts.sort(key=itemgetter(0))
        return (type(value).__qualname__, *parts)
