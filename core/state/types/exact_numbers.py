"""Checks that a type takes values completely: no integer is rounded, and no field is lost.

A float equals every integer up to 2^53, and only some beyond. So a value is checked when it is set,
and stored values are checked once, when a state opens with another type than it was written with.

A class ignores fields that it does not have. For stored values this is correct: a field was
removed. In a value that is set, it is a field of a subclass, or a key that a TypedDict does not
declare, which would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import inspect

from onceflow.core.decoding import type_info

Check: TypeAlias = Callable[[Any], None]
"""A function that raises ValueError unless a type takes a decoded MessagePack value completely."""


def to_exact_float(number: int) -> float:
    """Return `number` as the float that equals it.

    Raises:
        ValueError: No float equals `number`.
    """
    value = float(number)
    if value != number:
        raise ValueError(f"{number} cannot be a float exactly: it would become {int(value)}")
    return value


_ClassKind: TypeAlias = (
    inspect.StructType | inspect.DataclassType | inspect.TypedDictType | inspect.NamedTupleType
)


def make_integers_check(python_type: Any) -> Callable[[bytes], None] | None:
    """Return a check that raises ValueError if `python_type` would round an integer of a value.

    The check takes the bytes of a value. None if `python_type` has no floats.
    """
    return _make_bytes_check(_Checks(allows_unknown=True).of(type_info(python_type)))


def make_given_check(python_type: Any) -> Callable[[bytes], None] | None:
    """Return a check of a value that is set: raises ValueError if it rounds or loses fields.

    The check takes the bytes of a value. None if `python_type` has neither floats nor classes.
    """
    return _make_bytes_check(_Checks(allows_unknown=False).of(type_info(python_type)))


def _make_bytes_check(check: Check) -> Callable[[bytes], None] | None:
    return None if check is _pass else lambda data: check(msgspec.msgpack.decode(data))


class _Checks:
    """Creates the checks of one type."""

    def __init__(self, *, allows_unknown: bool) -> None:
        """Set up. If `allows_unknown`, a value may have fields that its class does not have."""
        self._allows_unknown = allows_unknown
        self._classes: dict[int, Check | None] = {}
        """The checks by the id of a class. None while a check is being created. Classes outlive
        this object."""

    def of(self, kind: inspect.Type) -> Check:
        check: Check
        match kind:
            case inspect.FloatType():
                check = _check_number
            case inspect.UnionType(types=alternatives):
                check = self._union(alternatives)
            case inspect.TupleType(item_types=items):
                check = _each(list(map(self.of, items)))
            case inspect.CollectionType(item_type=item):
                check = _all(self.of(item))
            case inspect.DictType(key_type=key, value_type=item):
                check = _entries(self.of(key), self.of(item))
            case (
                inspect.StructType()
                | inspect.DataclassType()
                | inspect.TypedDictType()
                | inspect.NamedTupleType()
            ):
                check = self._class(kind)
            case _:  # types without parts
                check = _pass
        return check

    def _class(self, kind: _ClassKind) -> Check:
        number = id(kind)
        if number not in self._classes:
            # Set before the fields are visited, so that a class that contains itself ends the
            # recursion.
            self._classes[number] = None
            checks = {field.encode_name: self.of(field.type) for field in kind.fields}
            tag = _find_tag(kind)
            if _is_by_position(kind):
                # A tagged class that is stored as an array has its tag first.
                parts = [*([] if tag is None else [_pass]), *checks.values()]
                check, unknown = _each(parts), _refuse_more(kind, len(parts))
            else:
                check, unknown = _fields(checks), _refuse_unknown(kind, checks)
            self._classes[number] = check if self._allows_unknown else _both(check, unknown)
        return self._classes[number] or self._later(number)

    def _later(self, number: int) -> Check:
        """Return a check that uses the class's check once it is created: for recursive classes."""

        def check(value: Any) -> None:
            made = self._classes[number]
            if made is not None:
                made(value)

        return check

    def _union(self, alternatives: Sequence[inspect.Type]) -> Check:
        """Return a check that selects the alternative by the value, as msgspec does."""
        integers = any(isinstance(alternative, inspect.IntType) for alternative in alternatives)
        tagged: dict[object, Check] = {}
        arrays: Check = _pass
        mappings: Check = _pass
        for alternative in alternatives:
            tag = _find_tag(alternative)
            if tag is not None:
                tagged[tag] = self.of(alternative)
            elif _is_by_position(alternative):
                arrays = self.of(alternative)
            elif isinstance(alternative, _MAPPINGS):
                mappings = self.of(alternative)
        fields = {
            alternative.tag_field
            for alternative in alternatives
            if isinstance(alternative, inspect.StructType)
        }

        rounds = not integers and any(
            isinstance(alternative, inspect.FloatType) for alternative in alternatives
        )

        def find_check(tags: Iterable[Any], otherwise: Check) -> Check:
            known = (tagged[tag] for tag in tags if isinstance(tag, str | int) and tag in tagged)
            return next(known, otherwise)

        def check(value: Any) -> None:
            if value.__class__ is list:
                find_check(value[:1], arrays)(value)
            elif value.__class__ is dict:
                find_check((value.get(field) for field in fields), mappings)(value)
            # If an integer is among the alternatives, an integer is read as one, and never rounded.
            elif rounds:
                _check_number(value)

        parts = (arrays, mappings, *tagged.values())
        return check if rounds or any(part is not _pass for part in parts) else _pass


_MAPPINGS = (
    inspect.DictType,
    inspect.StructType,
    inspect.DataclassType,
    inspect.TypedDictType,
)
"""The types that are mappings in MessagePack, unless they are stored by position."""


def _find_tag(kind: inspect.Type) -> str | int | None:
    return kind.tag if isinstance(kind, inspect.StructType) else None


def _is_by_position(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.StructType):
        return kind.array_like
    return isinstance(kind, inspect.CollectionType | inspect.TupleType | inspect.NamedTupleType)


def _pass(value: Any) -> None:
    """Accept any value."""


def _check_number(value: Any) -> None:
    if isinstance(value, int):
        to_exact_float(value)


def _all(check: Check) -> Check:
    def check_all(values: Any) -> None:
        for value in values:
            check(value)

    return _pass if check is _pass else check_all


def _entries(check_key: Check, check_value: Check) -> Check:
    def check_entries(mapping: Any) -> None:
        for key, value in mapping.items():
            check_key(key)
            check_value(value)

    return _pass if check_key is check_value is _pass else check_entries


def _each(checks: Sequence[Check]) -> Check:
    def check_each(values: Any) -> None:
        # New fields are at the end of the type and missing in old values; elements of removed
        # fields are at the end of old values. `zip` ignores both.
        for check, value in zip(checks, values, strict=False):
            check(value)

    return check_each if any(check is not _pass for check in checks) else _pass


def _fields(checks: Mapping[str, Check]) -> Check:
    def check_fields(values: Any) -> None:
        for name, check in checks.items():
            if name in values:
                check(values[name])

    return check_fields if any(check is not _pass for check in checks.values()) else _pass


def _both(first: Check, second: Check) -> Check:
    def check_both(values: Any) -> None:
        first(values)
        second(values)

    return second if first is _pass else check_both


def _refuse_unknown(kind: _ClassKind, known: Iterable[str]) -> Check:
    """Return a check that raises ValueError if a mapping has a key that is no field of `kind`."""
    names = set(known)
    if isinstance(kind, inspect.StructType) and kind.tag_field is not None:
        names.add(kind.tag_field)

    def check_names(values: Any) -> None:
        if not names.issuperset(values):
            lost = next(name for name in values if name not in names)
            raise _explain_lost_field(kind, f"field {lost!r}")

    return check_names


def _refuse_more(kind: _ClassKind, count: int) -> Check:
    """Return a check that raises ValueError if an array has more than `count` elements."""

    def check_length(values: Any) -> None:
        if len(values) > count:
            raise _explain_lost_field(kind, f"field number {count + 1}")

    return check_length


def _explain_lost_field(kind: _ClassKind, field: str) -> ValueError:
    name = kind.cls.__qualname__
    return ValueError(
        f"{name} has no {field}, so it would be lost. Declare it in {name}, or declare the state"
        " with the type of its values"
    )
