"""The users' functions that a query may call.

A function of Python values declares its types by annotations. `SqlFunction` declares the types of a
function of Arrow arrays. DataFusion calls both with arrays, on one thread at a time.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from importlib import import_module
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

import pyarrow as pa

from onceflow.core.argument_types import check_fields
from onceflow.core.arrow.exact_arrays import InexactValue, cast_exactly, exact_array
from onceflow.core.arrow.schema_text import schema_of
from onceflow.core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TYPES: Mapping[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
    date: pa.date32(),
    datetime: pa.timestamp("us", "UTC"),
}
"""The types of the values that a function of Python values may take and return."""


@check_fields
@dataclass(frozen=True, slots=True)
class SqlFunction:
    """A function of Arrow arrays that a query may call.

    `takes` has the type of each argument and `returns` the type of the result, as Arrow types or in
    SQL (`"DECIMAL(12, 2)"`). The function gets arrays of one length, and returns an array of this
    length.
    """

    function: Callable[..., pa.Array]
    takes: tuple[pa.DataType | str, ...]
    returns: pa.DataType | str


QueryFunction: TypeAlias = "SqlFunction | Callable[..., Any]"
"""A function that a query may call: of arrays, or of values with annotations."""
NO_FUNCTIONS: Mapping[str, QueryFunction] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A function under its name in a query. Pickled to the slots with the query."""

    name: str
    takes: tuple[pa.DataType, ...]
    returns: pa.DataType
    call: Callable[..., pa.Array]

    def register(self, context: Any, failures: list[Exception]) -> None:
        """Add the function to an engine. The function appends its own errors to `failures`.

        The engine would replace an error by a text.
        """
        returns, call, name = self.returns, self.call, self.name

        def call_checked(*arrays: pa.Array) -> pa.Array:
            try:
                result = call(*arrays)
                if not isinstance(cast("object", result), pa.Array):
                    raise TypeError(
                        f"function {name!r} returned {type(result).__name__}, but it must return a"
                        " pyarrow.Array"
                    )
                if arrays and len(result) != len(arrays[0]):
                    raise ValueError(
                        f"function {name!r} returned {len(result)} values for {len(arrays[0])} rows"
                    )
                return cast_exactly(result, returns)
            except Exception as error:
                failures.append(error)
                raise

        datafusion: Any = import_module("datafusion")
        # Not "stable" or "volatile": the result for a row may not depend on the batch, and equal
        # calls within a query are computed once.
        function = datafusion.udf(
            call_checked, list(self.takes), returns, "immutable", self.name.lower()
        )
        context.register_udf(function)


@dataclass(frozen=True, slots=True)
class _OfValues:
    """Calls a function of Python values for each row."""

    name: str
    function: Callable[..., Any]
    returns: pa.DataType

    def __call__(self, *arrays: pa.Array) -> pa.Array:
        rows = zip(*(array.to_pylist() for array in arrays), strict=True)
        values = [self.function(*row) for row in rows]
        try:
            return exact_array(values, self.returns)
        except InexactValue as error:
            value = f"{values[error.row]!r}" if error.row >= 0 else "a value"
            raise ValueError(
                f"function {self.name!r} returned {value}, which {self.returns} does not hold:"
                f" {error}"
            ) from error


def quote(name: str) -> str:
    """Return `name` as a quoted name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def name_functions(functions: Mapping[str, QueryFunction]) -> tuple[NamedFunction, ...]:
    """Return the functions of a query, given by name.

    Raises:
        ConfigError: A name is invalid or is given twice, or a function does not declare its types.
    """
    named: dict[str, NamedFunction] = {}
    for name, function in functions.items():
        owner = f"functions[{name!r}]"
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{owner}: use letters, digits and '_', beginning with a letter")
        # DataFusion compares the names of functions in lower case.
        if name.lower() in named:
            raise ConfigError(
                f"{owner} and {named[name.lower()].name!r} differ only in upper and lower case,"
                " which SQL does not distinguish: rename one"
            )
        named[name.lower()] = _name_function(name, function, owner)
    return tuple(named.values())


def _name_function(name: str, function: QueryFunction, owner: str) -> NamedFunction:
    if isinstance(function, SqlFunction):
        takes = tuple(_to_type(kind, owner) for kind in function.takes)
        named = NamedFunction(name, takes, _to_type(function.returns, owner), function.function)
    elif not callable(cast("object", function)):
        raise ConfigError(f"{owner} takes a function, and was given {function!r:.80}")
    else:
        takes, returns = _read_annotations(function, owner)
        named = NamedFunction(name, takes, returns, _OfValues(name, function, returns))
    if not takes:
        raise ConfigError(f"{owner} takes no argument, so its value is a constant: write the value")
    return named


def _to_type(kind: pa.DataType | str, owner: str) -> pa.DataType:
    return schema_of({"value": kind}, setting=owner).field(0).type


def _read_annotations(
    function: Callable[..., Any], owner: str
) -> tuple[tuple[pa.DataType, ...], pa.DataType]:
    try:
        hints = get_type_hints(function)
        parameters = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(
            f"{owner}: cannot read the types of its arguments: {error}; pass SqlFunction(…)"
        ) from error
    kinds = [_find_type(hints.get(name), name, owner) for name in (*parameters, "return")]
    return tuple(kinds[:-1]), kinds[-1]


def _find_type(hint: object, name: str, owner: str) -> pa.DataType:
    members = [hint]
    if get_origin(hint) in (Union, UnionType):
        members = [member for member in get_args(hint) if member is not NoneType]
    kind = _TYPES.get(members[0]) if len(members) == 1 else None
    if kind is None:
        where = "its result" if name == "return" else f"argument {name!r}"
        names = ", ".join(python_type.__name__ for python_type in _TYPES)
        raise ConfigError(
            f"{owner}: {where} needs an annotation with one of {names}. For other types, and to"
            " compute whole batches, pass SqlFunction(function, takes=(…), returns=…), whose"
            " function gets Arrow arrays"
        )
    return kind
