"""The check for arguments of users' functions in SQL that DataFusion would convert with a loss.

If an argument has another type than the function takes, DataFusion casts the values without a word:
BIGINT to DOUBLE rounds large numbers, and TIMESTAMP(9) to TIMESTAMP(6) drops nanoseconds. So a type
must be equal, or each of its values must have an equal value in the type that the function takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import pyarrow as pa

from onceflow.core.arrow.exact_arrays import InexactValue, cast_exactly, exact_array
from onceflow.core.arrow.kinds import is_bytes, is_list, is_text, to_plain_type
from onceflow.core.errors import ConfigError
from onceflow.core.plan.integer_overflow import find_expressions, list_operands, resolve_types
from onceflow.core.plan.sql_functions import NamedFunction

_UNITS = ("s", "ms", "us", "ns")
_FLOAT_BITS: Mapping[int, int] = {16: 11, 32: 24, 64: 53}
"""The bits of the integers that a float holds exactly, by the bits of the float."""

_SQL_TYPES: Mapping[pa.DataType, str] = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float32(): "REAL",
    pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR",
    pa.date32(): "DATE",
    pa.timestamp("us"): "TIMESTAMP(6)",
    pa.timestamp("us", "UTC"): "TIMESTAMP(6)",
}
"""The types that have a name in SQL. DataFusion converts to others by `arrow_cast`."""
_MISMATCH = re.compile(r"to satisfy a call to '(\w+)' function")
"""A part of DataFusion's error for arguments that it does not convert by itself."""


def check_arguments(
    context: Any, plan: Any, functions: tuple[NamedFunction, ...], owner: str
) -> None:
    """Raise ConfigError if a call in a logical plan might change the values of an argument.

    `owner` names the query.
    """
    by_name = {function.name.lower(): function for function in functions}
    if not by_name:
        return
    for below, expression in find_expressions(plan):
        for function, arguments in _find_calls(expression, by_name):
            rows = context.create_dataframe_from_logical_plan(below)
            columns = [argument.alias(f"c{at}") for at, argument in enumerate(arguments)]
            kinds = resolve_types(context, rows.select(*columns))
            for number, (argument, kind, takes) in enumerate(
                zip(arguments, kinds, function.takes, strict=True), 1
            ):
                if not (widens(kind, takes) or _is_exact_literal(argument, kind, takes)):
                    text = write_sql(rows, argument)
                    raise ConfigError(
                        f"{owner}: argument {number} of {function.name}(), {text}, is {kind}. The"
                        f" function takes {takes}, which may not hold its values exactly. Let it"
                        f" take {kind}, or write {_write_cast(text, takes)} to round or convert"
                        " them"
                    )


def advise_casts(problem: str, functions: tuple[NamedFunction, ...]) -> str:
    """Return the call to write if DataFusion's error `problem` is about argument types, or ""."""
    match = _MISMATCH.search(problem)
    called = match[1] if match else ""
    for function in functions:
        if function.name.lower() == called:
            casts = ", ".join(_write_cast("…", takes) for takes in function.takes)
            return f" Call it as {function.name}({casts}) to round or convert other types"
    return ""


def write_sql(rows: Any, argument: Any) -> str:
    """Return an argument as SQL over `rows`."""
    unparser: Any = import_module("datafusion.unparser")
    plan = rows.select(argument.alias("argument")).logical_plan()
    text: str = unparser.Unparser(unparser.Dialect.default()).plan_to_sql(plan)
    expression = text.removeprefix("SELECT ").partition(" AS argument FROM ")[0]
    is_column = argument.variant_name() == "Column"
    return expression.removeprefix('"stream".') if is_column else expression


def _write_cast(text: str, kind: pa.DataType) -> str:
    """Return SQL that converts the expression `text` to `kind`."""
    if pa.types.is_decimal(kind):
        return f"CAST({text} AS DECIMAL({kind.precision}, {kind.scale}))"
    if kind in _SQL_TYPES:
        return f"CAST({text} AS {_SQL_TYPES[kind]})"
    datafusion: Any = import_module("datafusion")
    null = pa.record_batch([pa.nulls(1, kind)], names=["value"])
    frame = datafusion.SessionContext().create_dataframe([[null]])
    named = frame.select(datafusion.functions.arrow_typeof(datafusion.col("value"))).collect()
    name: str = named[0].column(0)[0].as_py()
    return "arrow_cast({}, '{}')".format(text, name.replace("'", "''"))


def widens(kind: pa.DataType, wide: pa.DataType) -> bool:
    """Return True if each value of `kind` has an equal value in `wide`."""
    kind, wide = to_plain_type(kind), to_plain_type(wide)
    types = pa.types
    if kind == wide or types.is_null(kind):
        return True
    if is_list(kind) and is_list(wide):
        return widens(kind.value_type, wide.value_type)
    if types.is_integer(kind):
        return _integer_widens(kind, wide)
    if types.is_floating(kind):
        return bool(types.is_floating(wide)) and wide.bit_width > kind.bit_width
    if types.is_timestamp(wide):
        return _time_widens(kind, wide)
    return (is_text(kind) and is_text(wide)) or (is_bytes(kind) and is_bytes(wide))


def _integer_widens(kind: pa.DataType, wide: pa.DataType) -> bool:
    types = pa.types
    unsigned = bool(types.is_unsigned_integer(kind))
    if types.is_floating(wide):
        return kind.bit_width - (not unsigned) <= _FLOAT_BITS[wide.bit_width]
    if not types.is_integer(wide):
        return False
    if unsigned == bool(types.is_unsigned_integer(wide)):
        return wide.bit_width >= kind.bit_width
    return unsigned and wide.bit_width > kind.bit_width


def _time_widens(kind: pa.DataType, wide: pa.DataType) -> bool:
    # In another time zone, a time without a zone would be another instant, or none.
    is_utc = wide.tz is None or wide.tz == "UTC"
    if not pa.types.is_timestamp(kind):
        return bool(pa.types.is_date(kind)) and is_utc
    same = is_utc if kind.tz is None else wide.tz is not None
    # A cast to a finer unit raises an error for times that are too far away.
    return same and _UNITS.index(wide.unit) >= _UNITS.index(kind.unit)


def _is_exact_literal(argument: Any, kind: pa.DataType, takes: pa.DataType) -> bool:
    """Return True if the argument is an integer in the query that a float `takes` holds exactly."""
    if argument.variant_name() != "Literal":
        return False
    if not (pa.types.is_integer(kind) and pa.types.is_floating(takes)):
        return False
    try:
        cast_exactly(exact_array([argument.python_value().as_py()], kind), takes)
    except InexactValue:
        return False
    return True


def _find_calls(
    expression: Any, functions: Mapping[str, NamedFunction]
) -> Iterator[tuple[NamedFunction, list[Any]]]:
    """Yield each call of one of `functions` in an expression, with its arguments."""
    operands = list_operands(expression)
    if expression.variant_name() == "ScalarFunction":
        function = functions.get(expression.rex_call_operator().lower())
        if function is not None:
            yield function, operands
    for operand in operands:
        yield from _find_calls(operand, functions)
