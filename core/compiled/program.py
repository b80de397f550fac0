"""What a translated function is: the text of its kernel, and what goes in and out of that.

A kernel takes, in this order, and every array of it in the order of rows unless it is of keys:

    the number of rows; each row's key, as a number from 0
    an array for each of `columns`
    a value for each of `constants`
    for each of `states`: the keys' values, and whether each key has one; both are changed
    where it puts each result's row; an array for each of `outputs` that is computed

It returns how many results there are, or raises ArithmeticError; see `arithmetic`. It then has
changed nothing but its arguments. Values are 64-bit integers, 64-bit floats and booleans. A time is
the integer that Arrow has for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from onceflow.core.state import ValueStateDescriptor

Kind: TypeAlias = str
"""INTEGER, FLOAT, BOOLEAN, or the name of an Arrow type of timestamps."""

INTEGER: Kind = "int"
FLOAT: Kind = "float"
BOOLEAN: Kind = "bool"

_UNITS = ("s", "ms", "us")
"""Python has no nanoseconds."""


@dataclass(frozen=True, slots=True)
class StateColumn:
    """A value state: the attribute of the function that it is in, and what `open` asked for."""

    attribute: str
    descriptor: ValueStateDescriptor[Any]
    kind: Kind


@dataclass(frozen=True, slots=True)
class OutputColumn:
    """A column of results: an input column as it is, or else computed."""

    name: str
    passed_on: str | None
    kind: Kind = ""


@dataclass(frozen=True, slots=True)
class CompiledFunction:
    """A function of records in the form in which slots get it."""

    name: str
    source: str
    """The kernel, a function `kernel` of Python that numba compiles."""
    columns: tuple[tuple[str, Kind], ...]
    constants: tuple[tuple[str, Kind], ...]
    states: tuple[StateColumn, ...]
    outputs: tuple[OutputColumn, ...]
    results_max: int
    """How many results a record has at most."""


def kind_of_type(arrow_type: pa.DataType) -> Kind | None:
    """Return the kind of an Arrow type's values; None: kernels do not compute with them."""
    types = pa.types
    if types.is_integer(arrow_type):
        return INTEGER
    if types.is_float32(arrow_type) or types.is_float64(arrow_type):
        return FLOAT
    if types.is_boolean(arrow_type):
        return BOOLEAN
    # Python compares times of a zone with changing offsets by the clock on the wall.
    if types.is_timestamp(arrow_type) and arrow_type.tz in (None, "UTC"):
        return str(arrow_type) if arrow_type.unit in _UNITS else None
    return None


def kind_of_value(value: object) -> Kind | None:
    """Return the kind of a Python number; None: it is none, or beyond 64 bits."""
    if type(value) is bool:
        return BOOLEAN
    if type(value) is float:
        return FLOAT
    if type(value) is int and -(2**63) <= value < 2**63:
        return INTEGER
    return None


def dtype_of(kind: Kind) -> np.dtype[Any]:
    """Return the type of the kernel's arrays of a kind."""
    names = {FLOAT: "float64", BOOLEAN: "bool"}
    return np.dtype(names.get(kind, "int64"))
