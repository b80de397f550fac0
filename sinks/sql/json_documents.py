"""JSON documents in columns that parse them: what is no document, and what a column would lose.

Postgres' jsonb and MySQL's json keep the meaning of a document and not its text. Of a key that an
object has twice both keep the last value, and MySQL makes a double of each number that is no
integer of 64 bits. A document that is refused only when its rows are decided would stop all commits
after it, so every document is parsed before it is sent.
"""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from typing import Any, cast

_INTEGER_MIN, _INTEGER_MAX = -(2**63), 2**64 - 1
_INTEGER_LETTERS_MAX = 20
"""The letters of the longest integer of 64 bits. Longer ones need not be parsed."""
_NUMERIC_DIGITS_MAX, _NUMERIC_DIGITS_BEHIND_MAX = 131_072, 16_383
"""Source: PostgreSQL 18 documentation, 8.1.2. Numbers outside end the statement that sends them."""


class _Refused(ValueError):
    """Raised while a document is parsed; says why."""


def find_syntax_fault(text: str) -> str | None:
    """Return why `text` is no JSON document, or None."""
    return _find_fault(_CHECKS_SYNTAX, text)


def find_binary_fault(text: str) -> str | None:
    """Return why Postgres' jsonb does not keep the meaning of `text`, or None."""
    fault = _find_fault(_CHECKS_KEYS, text)
    if fault is None and "\\u" in text:
        return _find_escape_fault(text)
    return fault


def find_double_fault(text: str) -> str | None:
    """Return why MySQL's json does not keep the meaning of `text`, or None."""
    return _find_fault(_CHECKS_KEYS_AND_NUMBERS, text)


def _find_fault(decoder: json.JSONDecoder, text: str) -> str | None:
    try:
        decoder.decode(text)
    except _Refused as fault:
        return str(fault)
    except json.JSONDecodeError as error:
        return f"it is no JSON: {error.msg} at letter {error.pos}"
    except RecursionError:
        return "its arrays and objects lie too deep inside each other"
    return None


def _find_escape_fault(text: str) -> str | None:
    """Return what jsonb, which stores UTF-8 without NUL, has no letter for."""
    for part in _texts_in(json.loads(text)):
        if "\0" in part:
            return "it holds \\u0000, and Postgres stores no NUL"
        if not part.isascii() and any("\ud800" <= letter <= "\udfff" for letter in part):
            return "it holds half of a surrogate pair"
    return None


def _texts_in(document: Any) -> list[str]:
    waiting, texts = [document], list[str]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            texts += part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return texts


def _require_single_keys(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) == len(pairs):
        return
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _Refused(f"an object has the key {key!r} twice, and the column keeps one")
        seen.add(key)


def _require_exact_float(text: str) -> None:
    """Raise _Refused unless the nearest double stands for the same number."""
    nearest = float(text)
    if nearest in (float("inf"), float("-inf")) or Decimal(repr(nearest)) != Decimal(text):
        raise _Refused(f"the column makes the double {nearest!r} of the number {text[:80]}")


def _require_exact_integer(text: str) -> None:
    if len(text) > _INTEGER_LETTERS_MAX or not _INTEGER_MIN <= int(text) <= _INTEGER_MAX:
        _require_exact_float(text)


def _require_numeric(text: str) -> None:
    """Raise _Refused unless Postgres' numeric, which jsonb makes of numbers, holds the number."""
    if len(text) <= _NUMERIC_DIGITS_BEHIND_MAX and "e" not in text and "E" not in text:
        return
    try:
        number = Decimal(text)
    except InvalidOperation:  # an exponent beyond what Python counts
        raise _Refused(f"Postgres' numeric does not hold {text[:80]}") from None
    digits_behind = -cast("int", number.as_tuple().exponent)
    if number.adjusted() >= _NUMERIC_DIGITS_MAX or digits_behind > _NUMERIC_DIGITS_BEHIND_MAX:
        raise _Refused(
            f"Postgres' numeric has up to {_NUMERIC_DIGITS_MAX} digits before the point and"
            f" {_NUMERIC_DIGITS_BEHIND_MAX} behind it, and does not hold {text[:80]}"
        )


def _refuse_constant(name: str) -> None:
    raise _Refused(f"it is no JSON: {name} is no number of JSON")


_CHECKS_SYNTAX = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_refuse_constant)
_CHECKS_KEYS = json.JSONDecoder(
    object_pairs_hook=_require_single_keys,
    parse_float=_require_numeric,
    parse_int=_require_numeric,
    parse_constant=_refuse_constant,
)
_CHECKS_KEYS_AND_NUMBERS = json.JSONDecoder(
    object_pairs_hook=_require_single_keys,
    parse_float=_require_exact_float,
    parse_int=_require_exact_integer,
    parse_constant=_refuse_constant,
)
