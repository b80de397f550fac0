"""The type tables of one kind of database for the tests of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import pyarrow as pa
from hypothesis import strategies as st

Samples: TypeAlias = Sequence[tuple[str, pa.DataType, list[Any]]]
"""Type of the column, Arrow type, values."""
Refused: TypeAlias = Sequence[tuple[str, pa.Array, str]]
"""Type of the column, values of which one is refused, what is said of it."""


@dataclass(frozen=True)
class TypeTables:
    """Types by the names that this kind of database has for them."""

    samples: Samples
    modes: tuple[str, ...]
    """The write modes that send values in ways of their own."""
    comparable: Callable[[Any], object]
    """Makes what the driver and Arrow return alike, where they differ in form alone."""
    misfits: Refused
    """Values that do not fit."""
    refused_by_server: Sequence[tuple[str, pa.Array, str, str]]
    """As `misfits` those of which only the server knows; what is said of inserts, and by key."""
    forbidden: Sequence[tuple[str, pa.DataType]]
    """Columns that would change the values of an Arrow type."""
    created: Sequence[tuple[pa.DataType, str]]
    """What columns of new tables are, by the Arrow type."""
    uncreated: Sequence[pa.DataType]
    """Arrow types that no new table takes."""
    said_of_uncreated: str
    keys: Sequence[tuple[str, pa.Array]]
    """Types of key columns, each with keys for three rows."""
    fuzzed: Mapping[str, tuple[str, st.SearchStrategy[Any], pa.DataType]]
    """Columns that take whatever a strategy draws."""
    fuzzes: int
    """How often to draw."""
    shown_types: str
    """A query for the types of the columns of `{table}`."""
    setup: tuple[str, ...] = ()
    """What a database needs for all of these."""
    expressions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """What shows the values of a column that the driver shows otherwise."""
