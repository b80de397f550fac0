"""The rules by which a state may be asked for with another type than it was written with.

Types have the names of `signatures.type_name`. A type *widens* another if each of the other's
values can be read as one of its own: `float` and `int | None` widen `int`, and `list[float]` widens
`list[int]`. A class widens another of the same name if each new field has a default, and the type
of each common field is equal or widened. Removed fields are ignored.

Some types widen others for some values only: an integer beyond 2^53 may not be a float, and a field
that no longer has a default may be missing. Then all values are read when the state opens.
"""

from __future__ import annotations

from functools import lru_cache

from onceflow.core.state.types.parsed_names import (
    ClassType,
    NamedType,
    NamedTypes,
    NameElement,
    NameField,
    NameFields,
    ParsedName,
    text_of,
)
from onceflow.core.state.types.serializers import LIST_PREFIX, TTL_PREFIX
from onceflow.core.state.types.type_names import PYTHON_FORMAT

_MAP_ARROW = " -> "
_OF_ELEMENTS = frozenset({"list", "set", "frozenset", "tuple"})
_INT, _FLOAT = NamedType("int"), NamedType("float")


def reads_as(stored: str, asked: str) -> bool:
    """Return True if values of signature `stored` can be read with signature `asked`.

    A time to live may be added, but not removed.
    """
    return stored == asked or explain_misfit(stored, asked) is None


def explain_misfit(stored: str, asked: str) -> str | None:
    """Return the reason why values of signature `stored` cannot be read with `asked`, or None.

    The text is empty if the two signatures explain the reason.
    """
    return _compare(stored, asked)[0]


def depends_on_values(stored: str, asked: str) -> bool:
    """Return True if `asked` widens `stored` for some of its values only."""
    return stored != asked and _compare(stored, asked)[1]


@lru_cache(maxsize=256)
def _compare(stored: str, asked: str) -> tuple[str | None, bool]:
    old_key, _, old = stored.rpartition(_MAP_ARROW)
    new_key, _, new = asked.rpartition(_MAP_ARROW)
    expires, expired_before = new.startswith(TTL_PREFIX), old.startswith(TTL_PREFIX)
    if old_key != new_key or (expired_before and not expires):
        return "", False
    old, new = old.removeprefix(TTL_PREFIX), new.removeprefix(TTL_PREFIX)
    if old.startswith(LIST_PREFIX) and new.startswith(LIST_PREFIX):
        old, new = old.removeprefix(LIST_PREFIX), new.removeprefix(LIST_PREFIX)
    if old == new:
        return None, False
    if not (old.startswith(PYTHON_FORMAT) and new.startswith(PYTHON_FORMAT)):
        return "", False
    comparison = _Comparison(
        ParsedName(old.removeprefix(PYTHON_FORMAT)), ParsedName(new.removeprefix(PYTHON_FORMAT))
    )
    return comparison.misfit(), comparison.depends_on_values


class _Comparison:
    """Compares two types: whether one widens the other, and for which values."""

    def __init__(self, stored: ParsedName, asked: ParsedName) -> None:
        self._stored = stored
        self._asked = asked
        self._met: set[tuple[int, int]] = set()
        """The pairs of classes that are or were compared. Classes may contain themselves."""
        self.depends_on_values = False

    def misfit(self) -> str | None:
        """Return the reason why `asked` does not widen `stored`, or None."""
        return self._compare_types(self._stored.type, self._asked.type, "")

    def _compare_types(self, stored: NamedTypes, asked: NamedTypes, where: str) -> str | None:
        """Return the reason why `asked`, of field `where`, does not widen `stored`, or None."""
        for old in stored:
            alike = [new for new in asked if new.word == old.word]
            if not alike and old == _INT and _FLOAT in asked:
                self.depends_on_values = True
                continue
            reasons = [self._compare_elements(old, new) for new in alike]
            if None not in reasons:
                inside = next(filter(None, reasons), "")
                types = f"{where} was {text_of(stored)} and is {text_of(asked)}" if where else ""
                return inside or types
        return None

    def _compare_elements(self, old: NameElement, new: NameElement) -> str | None:
        """Return the reason why `new` does not widen `old`, a type of the same word, or None."""
        match old, new:
            case ClassType(), ClassType():
                return self._compare_classes(old, new)
            case NamedType(arguments=()), ClassType():
                # The version that wrote it did not store the fields: the values must be read.
                self.depends_on_values = True
                return None
            case NamedType(), NamedType():
                return self._compare_generics(old, new)
            case _:
                return ""

    def _compare_generics(self, old: NamedType, new: NamedType) -> str | None:
        pairs = list(zip(old.arguments, new.arguments, strict=False))
        if len(old.arguments) != len(new.arguments):
            return ""
        if old.word == "dict" and pairs:
            if text_of(old.arguments[0]) != text_of(new.arguments[0]):
                return ""
        elif old.word not in _OF_ELEMENTS:
            return None if old == new else ""
        reasons = (self._compare_types(*pair, "") for pair in pairs)
        return next((reason for reason in reasons if reason is not None), None)

    def _compare_classes(self, old: ClassType, new: ClassType) -> str | None:
        pair = (old.number, new.number)
        if pair in self._met:
            return None
        self._met.add(pair)
        kept, asked = self._stored.fields[old.number], self._asked.fields[new.number]
        if kept.by_position or asked.by_position:
            moved = _explain_moved_field(new.word, kept, asked)
            if moved is not None:
                return moved
        for name, field in asked.named.items():
            reason = self._compare_field(kept.named.get(name), field, f"{new.word}.{name}")
            if reason is not None:
                return reason
        return None

    def _compare_field(self, old: NameField | None, new: NameField, where: str) -> str | None:
        if old is None:
            return None if new.optional else f"field `{where}` is new and has no default"
        self.depends_on_values |= old.optional and not new.optional
        return self._compare_types(old.type, new.type, f"field `{where}`")


def _explain_moved_field(word: str, kept: NameFields, asked: NameFields) -> str | None:
    """Return the reason why fields stored by position are not in their old order, or None."""
    if kept.by_position != asked.by_position:
        before, now = ("by position", "by name")[:: 1 if kept.by_position else -1]
        return f"the fields of {word} were kept {before} and are asked for {now}"
    for number, (old, new) in enumerate(zip(kept.named, asked.named, strict=False), 1):
        if old != new:
            return f"field {number} of {word} was `{old}` and is `{new}`, and they go by position"
    return None
