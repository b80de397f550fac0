"""The check for integer overflow in SQL queries, which DataFusion lets wrap around silently.

In DataFusion, only sums, differences, products and negations of integers wrap around. The engine
itself checks quotients, casts, decimals and times. This module finds the wrapping expressions in
the plan, computes their operands again, and lets Arrow check the operation. A branch of a CASE, or
the right side of AND and OR, is checked only for rows whose result depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.arrow.kinds import cast_rows

_CHECKED: dict[str, Callable[[pa.Array, pa.Array], pa.Array]] = {
    "+": pc.add_checked,
    "-": pc.subtract_checked,
    "*": pc.multiply_checked,
}


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """An expression that may wrap around, and the conditions of the rows that depend on it."""

    text: str
    operator: str
    result: Any
    left: Any
    right: Any
    conditions: tuple[Any, ...]


def computes_integers(context: Any, plan: Any) -> bool:
    """Return True if a logical plan has an expression that might wrap around."""
    return any(True for _ in _select_integers(context, plan))


def check_integers(context: Any, plan: Any) -> None:
    """Raise OverflowError if an integer overflows for a row that `plan` reads.

    Raises:
        OverflowError: An integer overflows. The message names the expression and both values.
    """
    for group, frame in _select_integers(context, plan):
        for rows in frame.collect():
            for number, arithmetic in enumerate(group):
                _check_rows(arithmetic, *rows.columns[3 * number : 3 * number + 3])


def _select_integers(context: Any, plan: Any) -> Iterator[tuple[list[_Arithmetic], Any]]:
    """Yield groups of integer expressions over the same rows, each with a frame of these rows.

    The frame has three columns for each expression: the result and both operands.
    """
    by_rows = groupby(
        _find_in_plan(plan), key=lambda pair: (id(pair[0]), *map(id, pair[1].conditions))
    )
    for _, members in by_rows:
        alike = list(members)
        frame = context.create_dataframe_from_logical_plan(alike[0][0])
        for condition in alike[0][1].conditions:
            frame = frame.filter(condition)
        kinds = frame.select(
            *(arithmetic.result.alias(f"c{at}") for at, (_, arithmetic) in enumerate(alike))
        )
        group = [
            arithmetic
            for (_, arithmetic), column in zip(alike, kinds.schema(), strict=True)
            if pa.types.is_integer(column.type)
        ]
        columns = [
            column
            for arithmetic in group
            for column in (arithmetic.result, arithmetic.left, arithmetic.right)
        ]
        if columns:
            yield (
                group,
                frame.select(
                    *(expression.alias(f"c{at}") for at, expression in enumerate(columns))
                ),
            )


def _check_rows(arithmetic: _Arithmetic, result: pa.Array, left: pa.Array, right: pa.Array) -> None:
    kind = result.type
    # The result of a CASE may have another type than the plan says. A difference of two dates is a
    # number of days, which cannot overflow.
    if not pa.types.is_integer(kind) or pa.types.is_temporal(left.type):
        return
    compute = _CHECKED[arithmetic.operator]
    try:
        compute(cast_rows(left, kind), cast_rows(right, kind))
    except pa.ArrowInvalid:
        # Arrow does not say which row overflowed, so search for it. The job fails anyway, so the
        # search may be slow.
        for row in range(len(result)):
            value, other = left.slice(row, 1), right.slice(row, 1)
            try:
                compute(cast_rows(value, kind), cast_rows(other, kind))
            except pa.ArrowInvalid:
                raise OverflowError(
                    f"{arithmetic.text} leaves {kind}: {value[0]} {arithmetic.operator} {other[0]}."
                    " Cast one side to a wider type, to DECIMAL(38, 0) for instance"
                ) from None


def _find_in_plan(plan: Any) -> Iterator[tuple[Any, _Arithmetic]]:
    """Yield each expression of `plan` that may wrap, with the plan that provides its input rows."""
    for below, expression in find_expressions(plan):
        for arithmetic in _find_in_expression(expression, ()):
            yield below, arithmetic


def find_expressions(plan: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each expression of a plan row by row, with the plan that provides its input rows."""
    node = plan.to_variant()
    expressions: list[Any] = []
    kind = type(node).__name__
    if kind == "Projection":
        expressions = node.projections()
    elif kind == "Filter":
        expressions = [node.predicate()]
    wrap: Any = import_module("datafusion").Expr
    for below in plan.inputs():
        for expression in expressions:
            yield below, wrap(expression)
        yield from find_expressions(below)


def _find_in_expression(expression: Any, conditions: tuple[Any, ...]) -> Iterator[_Arithmetic]:
    variant = expression.variant_name()
    if variant == "Case":
        yield from _find_in_case(expression.to_variant(), conditions)
        return
    operands = list_operands(expression)
    operator = expression.rex_call_operator() if variant == "BinaryExpr" else ""
    if operator in ("AND", "OR"):
        left, right = operands
        yield from _find_in_expression(left, conditions)
        # The engine may compute the right side for all rows and ignore it where the left side
        # decides. Check only the rows that use the right side.
        decides_not = _is_true(left) if operator == "AND" else ~_is_true(left)
        yield from _find_in_expression(right, (*conditions, decides_not))
        return
    # A negation is checked as 0 - x. It overflows only for the lowest value.
    if operator in _CHECKED or variant == "Negative":
        literal: Any = import_module("datafusion").lit
        left, right = operands if operator else (literal(0), operands[0])
        text = expression.canonical_name()
        yield _Arithmetic(text, operator or "-", expression, left, right, conditions)
    for operand in operands:
        yield from _find_in_expression(operand, conditions)


def _find_in_case(case: Any, conditions: tuple[Any, ...]) -> Iterator[_Arithmetic]:
    wrap: Any = import_module("datafusion").Expr
    subject, otherwise = case.expr(), case.else_expr()
    if subject is not None:
        yield from _find_in_expression(wrap(subject), conditions)
    for when, then in case.when_then_expr():
        yield from _find_in_expression(wrap(when), conditions)
        holds = wrap(when) if subject is None else wrap(subject) == wrap(when)
        yield from _find_in_expression(wrap(then), (*conditions, _is_true(holds)))
        # A branch applies only where no earlier condition held.
        conditions = (*conditions, ~_is_true(holds))
    if otherwise is not None:
        yield from _find_in_expression(wrap(otherwise), conditions)


def _is_true(condition: Any) -> Any:
    """Return `condition` with nulls replaced by false."""
    datafusion: Any = import_module("datafusion")
    return datafusion.functions.coalesce(condition, datafusion.lit(False))


def resolve_types(context: Any, frame: Any) -> list[pa.DataType]:
    """Return the types of the columns of `frame` as the engine computes them.

    Only the optimizer knows the type of a CASE: before, it is that of the first branch.
    """
    plan = frame.optimized_logical_plan()
    return [field.type for field in context.create_dataframe_from_logical_plan(plan).schema()]


def list_operands(expression: Any) -> list[Any]:
    """Return the expressions of which an expression consists."""
    if expression.variant_name() in ("Column", "Literal"):
        return []
    try:
        return list(expression.rex_call_operands())
    except Exception:  # this kind of expression has no operands
        return []
