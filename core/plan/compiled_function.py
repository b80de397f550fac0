"""A translated function: the text of its kernel, and the kernel's inputs and outputs.

The parameters of a kernel, in this order (arrays are in the order of rows unless they are by key):

    the number of rows; each row's key, as a number from 0
    an array for each of `columns`
    a value for each of `constants`
    for each of `states`: the keys' values, and whether each key has one; the kernel changes both
    an array for the row of each result; an array for each of `outputs` that is computed

It returns the number of results, or raises ArithmeticError; see `arithmetic`. If it raises, it has
changed only its arguments. Values are 64-bit integers, 64-bit floats and booleans. A time is the
integer by which Arrow stores it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from onceflow.core.state import ValueStateDescriptor

Kind: TypeAlias = str
"""The kind of values: INTEGER, FLOAT, BOOLEAN, or the name of an Arrow type of timestamps."""

INTEGER: Kind = "int"
FLOAT: Kind = "float"
BOOLEAN: Kind = "bool"

_UNITS = ("s", "ms", "us")
"""The units of time that Python supports: it has no nanoseconds."""


@dataclass(frozen=True, slots=True)
class StateColumn:
    """A value state: the function's attribute that holds it, and its descriptor in `open`."""

    attribute: str
    descriptor: ValueStateDescriptor[Any]
    kind: Kind


@dataclass(frozen=True, slots=True)
class OutputColumn:
    """A column of results: an unchanged input column, or a computed column."""

    name: str
    passed_on: str | None
    kind: Kind = ""


@dataclass(frozen=True, slots=True)
class CompiledFunction:
    """A function by record in the form in which slots get it."""

    name: str
    source: str
    """The kernel: the text of a Python function `kernel` that numba compiles."""
    columns: tuple[tuple[str, Kind], ...]
    constants: tuple[tuple[str, Kind], ...]
    states: tuple[StateColumn, ...]
    outputs: tuple[OutputColumn, ...]
    results_max: int
    """The maximum number of results of a record."""


def kind_of_type(arrow_type: pa.DataType) -> Kind | None:
    """Return the kind of an Arrow type's values, or None if kernels cannot compute with them."""
    types = pa.types
    if types.is_integer(arrow_type):
        return INTEGER
    if types.is_float32(arrow_type) or types.is_float64(arrow_type):
        return FLOAT
    if types.is_boolean(arrow_type):
        return BOOLEAN
    # For times in a zone with changing offsets, Python compares local times.
    if types.is_timestamp(arrow_type) and arrow_type.tz in (None, "UTC"):
        return str(arrow_type) if arrow_type.unit in _UNITS else None
    return None


def kind_of_value(value: object) -> Kind | None:
    """Return the kind of a Python number, or None if it is no number, or exceeds 64 bits."""
    if type(value) is bool:
        return BOOLEAN
    if type(value) is float:
        return FLOAT
    if type(value) is int and -(2**63) <= value < 2**63:
        return INTEGER
    return None


def dtype_of(kind: Kind) -> np.dtype[Any]:
    """Return the type of the kernel's arrays of `kind`."""
    names = {FLOAT: "float64", BOOLEAN: "bool"}
    return np.dtype(names.get(kind, "int64"))
