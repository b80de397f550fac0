"""What a process of the kit and the one that started it say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

Link: TypeAlias = "Connection[Any, Any]"
"""A two-way pipe of pickled values; the other end sees its end when the process is gone."""


@dataclass(frozen=True, slots=True)
class Began:
    """The first word of every process."""

    pid: int


@dataclass(frozen=True, slots=True)
class Returned:
    """The last word: what its function returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The last word: its function raised."""

    kind: str
    text: str
    trace: str
