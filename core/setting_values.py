"""The parsing of setting values: durations ("500 ms", "5 s", "10 min") and choices."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from onceflow.core.errors import ConfigError

_Choice = TypeVar("_Choice", bound=Enum)
_Class = TypeVar("_Class", bound="type[Any]")

if TYPE_CHECKING:

    class Seconds:
        """A settings field that is set in seconds or as text ("5 s") and read in seconds.

        Type checkers allow different types for setting and reading only in a descriptor. At run
        time the field is a float.
        """

        def __get__(self, instance: object, owner: type | None = None) -> float: ...
        def __set__(self, instance: object, value: float | str) -> None: ...

else:
    Seconds = float

_SECONDS_PER_UNIT = {
    "ms": 0.001,
    "millisecond": 0.001,
    "milliseconds": 0.001,
    "s": 1.0,
    "sec": 1.0,
    "second": 1.0,
    "seconds": 1.0,
    "m": 60.0,
    "min": 60.0,
    "minute": 60.0,
    "minutes": 60.0,
    "h": 3600.0,
    "hour": 3600.0,
    "hours": 3600.0,
    "d": 86_400.0,
    "day": 86_400.0,
    "days": 86_400.0,
}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def declare_seconds(default_s: float) -> Any:
    """Return `default_s` as the default of a field of type `Seconds`."""
    return default_s


def seconds_of(duration: float | str, *, setting: str) -> float:
    """Return `duration` in seconds. A plain number is in seconds.

    Raises:
        ConfigError: It is negative, infinite or not a duration. The message names `setting`.
    """
    if isinstance(duration, (int, float)):
        seconds = float(duration)
    else:
        match = _DURATION.fullmatch(duration)
        unit = _SECONDS_PER_UNIT.get(match[2].lower()) if match else None
        if match is None or unit is None:
            near = get_close_matches(match[2].lower(), _SECONDS_PER_UNIT, n=1) if match else []
            meant = f"did you mean '{match[1]} {near[0]}'? " if match and near else ""
            raise ConfigError(
                f"{setting}={duration!r} is not a duration; {meant}write seconds as a number, or a"
                " number with a unit: 500 ms, 5 s, 10 min, 1 h, 1 d"
            )
        seconds = float(match[1]) * unit
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{setting}={duration!r} must be zero or more, and finite")
    return seconds


def accept_durations(settings: _Class) -> _Class:
    """Make the dataclass `settings` accept text ("5 s") in each field whose name ends in `_s`.

    The object holds seconds. Fields that no subclass inherits are annotated as `Seconds`. Mypy
    treats an inherited `Seconds` field as a float or text, so inherited fields are annotated as
    floats.
    """
    initialize: Callable[..., None] = settings.__init__
    names = [field.name for field in fields(settings) if field.init]

    @wraps(initialize)
    def initialize_in_seconds(self: object, *values: object, **by_name: object) -> None:
        given = dict(zip(names, values, strict=False)) | by_name
        for name, value in given.items():
            if name.endswith("_s") and isinstance(value, str):
                given[name] = seconds_of(value, setting=name)
        # If there are more values than fields, or a field is given twice, the class raises its own
        # error.
        if len(given) < len(values) + len(by_name):
            initialize(self, *values, **by_name)
        initialize(self, **given)

    setattr(settings, "__init__", initialize_in_seconds)  # noqa: B010 - checkers mind assignment
    return settings


def choice_of(
    kind: type[_Choice], given: object, *, setting: str, besides: Sequence[str] = ()
) -> _Choice:
    """Return `given` as a member of `kind`. It may be a member or a member's value.

    Raises:
        ConfigError: There is no such member. The message names `setting`, all members, and the
            words in `besides`, which the caller accepts in addition.
    """
    try:
        return kind(given)
    except ValueError:
        known = ", ".join((*besides, *(str(member.value) for member in kind)))
        raise ConfigError(f"{setting}={given!r}: choose one of {known}") from None
