"""The check for casts of numbers to TIMESTAMP, which mean seconds or nanoseconds by the type.

DataFusion reads a BIGINT as seconds, as `to_timestamp` does. It reads every other number as
nanoseconds: a column of INT seconds would become times within three seconds of 1970.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from onceflow.core.arrow.kinds import is_list
from onceflow.core.errors import ConfigError
from onceflow.core.plan.function_arguments import write_sql
from onceflow.core.plan.integer_overflow import find_expressions, list_operands, resolve_types


def check_time_casts(context: Any, plan: Any, owner: str) -> None:
    """Raise ConfigError if a logical plan casts a number to TIMESTAMP as nanoseconds.

    `owner` names the query.
    """
    for below, expression in find_expressions(plan):
        _check_expression(context, below, expression, owner)


def _check_expression(context: Any, below: Any, expression: Any, owner: str) -> None:
    operands = list_operands(expression)
    if expression.variant_name() in ("Cast", "TryCast"):
        rows = context.create_dataframe_from_logical_plan(below)
        columns = [operands[0].alias("number"), expression.alias("time")]
        number, time = resolve_types(context, rows.select(*columns))
        while is_list(number) and is_list(time):
            number, time = number.value_type, time.value_type
        if _is_number(number) and pa.types.is_timestamp(time) and time.unit == "ns":
            text = write_sql(rows, operands[0])
            raise ConfigError(
                f"{owner}: a cast to TIMESTAMP takes {text}, of {number}, as nanoseconds since"
                f" 1970, but a BIGINT as seconds. Write to_timestamp_seconds({text}), or the same"
                " with _millis, _micros or _nanos"
            )
    for operand in operands:
        _check_expression(context, below, operand, owner)


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))
