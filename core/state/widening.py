"""Which states may be asked for under another type than they were written with.

Types go by the names that `serializers.type_name` gives them. A type *widens* another when each of
the other's values reads as one of its own: `float` and `int | None` widen `int`, and
`list[float]` widens `list[int]`. What a class holds is not in its name: whether the bytes of the
old one read as the new one, the bytes tell.
"""

from __future__ import annotations

from collections.abc import Sequence

from onceflow.core.state.serializers import TTL_PREFIX
from onceflow.core.state.type_names import PYTHON_FORMAT

_MAP_ARROW = " -> "
_OF_ELEMENTS = frozenset({"list", "set", "frozenset", "tuple"})


def reads_as(found: str, asked: str) -> bool:
    """Tell whether values of signature `found` are read under signature `asked`.

    Those that live for ever may be given a time to live.
    """
    if found == asked:
        return True
    old_key, _, old = found.rpartition(_MAP_ARROW)
    new_key, _, new = asked.rpartition(_MAP_ARROW)
    if old_key != new_key:
        return False
    old_expires, new_expires = old.startswith(TTL_PREFIX), new.startswith(TTL_PREFIX)
    if old_expires and not new_expires:
        return False
    old, new = old.removeprefix(TTL_PREFIX), new.removeprefix(TTL_PREFIX)
    if old == new:
        return True
    if not (old.startswith(PYTHON_FORMAT) and new.startswith(PYTHON_FORMAT)):
        return False
    return widens(old.removeprefix(PYTHON_FORMAT), new.removeprefix(PYTHON_FORMAT))


def widens(found: str, asked: str) -> bool:
    """Tell whether each value of the type called `found` reads as one of that called `asked`."""
    return all(
        any(_element_widens(old, new) for new in _split(asked, "|")) for old in _split(found, "|")
    )


def _element_widens(found: str, asked: str) -> bool:
    if found == asked or (found, asked) == ("int", "float"):
        return True
    (word, old), (other, new) = _generic(found), _generic(asked)
    if word != other or len(old) != len(new) or not old:
        return False
    if word == "dict":
        return old[0] == new[0] and widens(old[1], new[1])
    return word in _OF_ELEMENTS and all(map(widens, old, new))


def _generic(name: str) -> tuple[str, Sequence[str]]:
    """Return the word before the brackets, and the names in them."""
    word, bracket, inner = name.partition("[")
    return word, _split(inner.removesuffix("]"), ",") if bracket else ()


def _split(text: str, at: str) -> list[str]:
    """Return the parts between each `at` that is in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == at and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
