"""The checks of JSON documents for columns that parse them: is it JSON, and would it change.

Postgres' jsonb and MySQL's json store the parsed document and not its text. If an object has a key
twice, both keep the last value. MySQL turns each number that is not a 64-bit integer into a double.
A document that is refused only after its rows are decided would stop all later commits, so every
document is parsed before it is sent.
"""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from typing import Any, cast

_INTEGER_MIN, _INTEGER_MAX = -(2**63), 2**64 - 1
_INTEGER_LETTERS_MAX = 20
"""The length of the longest 64-bit integer. Longer texts need not be parsed as integers."""
_NUMERIC_DIGITS_MAX, _NUMERIC_DIGITS_BEHIND_MAX = 131_072, 16_383
"""Source: PostgreSQL 18 documentation, 8.1.2. A number outside of these limits fails its
statement."""


class _Refused(ValueError):
    """Raised while a document is parsed; the text says why."""


def find_syntax_fault(text: str) -> str | None:
    """Return why `text` is not a JSON document, or None if it is one."""
    return _find_fault(_CHECKS_SYNTAX, text)


def find_binary_fault(text: str) -> str | None:
    """Return why Postgres' jsonb would change `text`, or None if it would not."""
    fault = _find_fault(_CHECKS_KEYS, text)
    if fault is None and "\\u" in text:
        return _find_escape_fault(text)
    return fault


def find_double_fault(text: str) -> str | None:
    """Return why MySQL's json would change `text`, or None if it would not."""
    return _find_fault(_CHECKS_KEYS_AND_NUMBERS, text)


def _find_fault(decoder: json.JSONDecoder, text: str) -> str | None:
    try:
        decoder.decode(text)
    except _Refused as fault:
        return str(fault)
    except json.JSONDecodeError as error:
        return f"it is not JSON: {error.msg} at character {error.pos}"
    except RecursionError:
        return "its arrays and objects are nested too deeply"
    return None


def _find_escape_fault(text: str) -> str | None:
    """Return why jsonb, which stores UTF-8 without NUL, cannot store an escape, or None."""
    for part in _texts_in(json.loads(text)):
        if "\0" in part:
            return "it holds \\u0000, and Postgres stores no NUL"
        if not part.isascii() and any("\ud800" <= letter <= "\udfff" for letter in part):
            return "it contains half of a surrogate pair"
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
            raise _Refused(f"an object has the key {key!r} twice, but the column keeps only one")
        seen.add(key)


def _require_exact_float(text: str) -> None:
    """Raise _Refused unless the nearest double equals the number."""
    nearest = float(text)
    if nearest in (float("inf"), float("-inf")) or Decimal(repr(nearest)) != Decimal(text):
        raise _Refused(
            f"the column would store the double {nearest!r} instead of the number {text[:80]}"
        )


def _require_exact_integer(text: str) -> None:
    if len(text) > _INTEGER_LETTERS_MAX or not _INTEGER_MIN <= int(text) <= _INTEGER_MAX:
        _require_exact_float(text)


def _require_numeric(text: str) -> None:
    """Raise _Refused unless Postgres' numeric, jsonb's type of numbers, can hold the number."""
    if len(text) <= _NUMERIC_DIGITS_BEHIND_MAX and "e" not in text and "E" not in text:
        return
    try:
        number = Decimal(text)
    except InvalidOperation:  # an exponent beyond Python's limit
        raise _Refused(f"Postgres' numeric does not hold {text[:80]}") from None
    digits_behind = -cast("int", number.as_tuple().exponent)
    if number.adjusted() >= _NUMERIC_DIGITS_MAX or digits_behind > _NUMERIC_DIGITS_BEHIND_MAX:
        raise _Refused(
            f"Postgres' numeric has up to {_NUMERIC_DIGITS_MAX} digits before the point and"
            f" {_NUMERIC_DIGITS_BEHIND_MAX} after it, and cannot hold {text[:80]}"
        )


def _refuse_constant(name: str) -> None:
    raise _Refused(f"it is not JSON: {name} is not a JSON number")


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
