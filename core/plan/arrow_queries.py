"""Queries that Arrow computes itself, so that they need no plan for each batch.

DataFusion plans a query again for each batch, because a plan holds the rows of its table. This
takes 1 to 2 ms. Some queries only keep columns, compare columns with constants, and read integers
as timestamps. None of these steps can fail for a value, and Arrow returns the same values as
DataFusion. All other queries are left to DataFusion. Comparisons of floats are, too: for DataFusion
-0.0 is less than 0.0, and NaN equals NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.arrow.kinds import holds
from onceflow.core.plan.integer_overflow import find_expressions, list_operands

Evaluate: TypeAlias = Callable[[pa.RecordBatch], pa.Array]
"""A function that returns the values of an expression for the rows of a batch."""

_PURE = frozenset(
    {
        *("Alias", "Between", "Cast", "Column", "InList", "IsNotNull", "IsNull", "Literal", "Not"),
        *("arrow_cast", "AND", "OR", "=", "!=", "<", "<=", ">", ">="),
    }
)
"""The expressions that have the same value in each plan, and whose integers cannot wrap around."""
_COMPARISONS: Mapping[str, Callable[[Any, Any], pa.Array]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_CONNECTIVES: Mapping[str, Callable[[pa.Array, pa.Array], pa.Array]] = {
    "AND": pc.and_kleene,
    "OR": pc.or_kleene,
}


@dataclass(frozen=True, slots=True)
class ArrowQuery:
    """A query that computes each row alone and cannot fail."""

    columns: tuple[Evaluate, ...]
    """The columns of the result, computed from the kept rows."""
    reads: tuple[str, ...]
    """The columns of the stream that `columns` need."""
    condition: Evaluate | None
    """The condition of the rows to keep. None keeps all rows."""
    schema: pa.Schema
    """The schema of the result."""

    def select(self, rows: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return the result for `rows`, in their order.

        Return None if a column that must not have nulls has one. DataFusion raises an error then.
        """
        kept = rows.select(self.reads)
        if self.condition is not None:
            # A row whose condition is null is dropped.
            kept = kept.filter(self.condition(rows))
        arrays = [evaluate(kept) for evaluate in self.columns]
        for field, array in zip(self.schema, arrays, strict=True):
            if array.null_count and not field.nullable:
                return None
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def translate_query(
    plan: Any, optimized: Any, stream: pa.Schema, result: pa.Schema
) -> ArrowQuery | None:
    """Return the query of a logical plan, or None if DataFusion must compute it.

    `plan` is the plan before the optimizer, and `optimized` the plan after it. `stream` is the
    schema of the table, and `result` the schema of the query's result.
    """
    if not all(_is_pure(expression) for _, expression in find_expressions(plan)):
        return None
    try:
        return _translate_plan(optimized, stream, result)
    except _NotForArrow:
        return None


class _NotForArrow(Exception):
    """The query has a node or an expression that is left to DataFusion."""


def _is_pure(expression: Any) -> bool:
    return _name_operation(expression) in _PURE and all(map(_is_pure, list_operands(expression)))


def _name_operation(expression: Any) -> str:
    """Return the kind of an expression, or its operator or function if it has one."""
    kind: str = expression.variant_name()
    if kind in ("BinaryExpr", "ScalarFunction"):
        kind = expression.rex_call_operator()
    return kind


def _translate_plan(plan: Any, stream: pa.Schema, result: pa.Schema) -> ArrowQuery:
    """Return the query of a projection or none, over a filter or none, over the scan."""
    wrap: Any = import_module("datafusion").Expr
    outputs: list[Any] | None = None
    condition: Evaluate | None = None
    node = plan.to_variant()
    if type(node).__name__ == "Projection":
        outputs = [wrap(expression) for expression in node.projections()]
        [plan] = plan.inputs()
        node = plan.to_variant()
    if type(node).__name__ == "Filter":
        condition = _translate_condition(wrap(node.predicate()), stream)
        [plan] = plan.inputs()
        node = plan.to_variant()
    if type(node).__name__ != "TableScan" or node.filters() or node.fetch() is not None:
        raise _NotForArrow
    if outputs is None:
        columns = [_keep_column(field.name, stream, field.type) for field in result]
        return ArrowQuery(tuple(columns), tuple(result.names), condition, result)
    columns = [
        _translate_output(output, stream, field.type)
        for output, field in zip(outputs, result, strict=True)
    ]
    reads = dict.fromkeys(name for output in outputs for name in _find_columns(output))
    return ArrowQuery(tuple(columns), tuple(reads), condition, result)


def _find_columns(expression: Any) -> Iterator[str]:
    """Yield the name of each column that `expression` reads."""
    if expression.variant_name() == "Column":
        yield expression.to_variant().name()
    for operand in list_operands(expression):
        yield from _find_columns(operand)


def _find_type(name: str, stream: pa.Schema) -> pa.DataType:
    # A column that is not in the stream is one of the optimizer.
    if name not in stream.names:
        raise _NotForArrow
    return stream.field(name).type


def _keep_column(name: str, stream: pa.Schema, kind: pa.DataType) -> Evaluate:
    # The digits of a decimal are checked, and the check can fail.
    if _find_type(name, stream) != kind or holds(kind, pa.types.is_decimal):
        raise _NotForArrow
    return lambda rows: rows.column(name)


def _translate_output(expression: Any, stream: pa.Schema, kind: pa.DataType) -> Evaluate:
    """Return the values of type `kind` of an output column."""
    match expression.variant_name():
        case "Alias":
            return _translate_output(list_operands(expression)[0], stream, kind)
        case "Column":
            return _keep_column(expression.to_variant().name(), stream, kind)
        case "Cast" if pa.types.is_timestamp(kind) and kind.tz is None:
            [operand] = list_operands(expression)
            integers = _translate_output(operand, stream, pa.int64())
            return lambda rows: integers(rows).view(kind)
        case _ if pa.types.is_boolean(kind):
            return _translate_condition(expression, stream)
        case _:
            raise _NotForArrow


def _translate_condition(expression: Any, stream: pa.Schema) -> Evaluate:
    """Return the truth of a condition for each row: true, false, or null if it is unknown."""
    operands = list_operands(expression)
    operator = _name_operation(expression)
    if operator == "Column":
        return _keep_column(expression.to_variant().name(), stream, pa.bool_())
    if operator in _CONNECTIVES:
        connect = _CONNECTIVES[operator]
        left, right = (_translate_condition(operand, stream) for operand in operands)
        return lambda rows: connect(left(rows), right(rows))
    if operator == "Not":
        inner = _translate_condition(operands[0], stream)
        return lambda rows: pc.invert(inner(rows))
    return _translate_test(operator, operands, stream)


def _translate_test(operator: str, operands: list[Any], stream: pa.Schema) -> Evaluate:
    """Return the truth of a comparison of a column with a constant, or of a test for nulls."""
    if not operands or operands[0].variant_name() != "Column":
        raise _NotForArrow
    name = operands[0].to_variant().name()
    kind = _find_type(name, stream)
    constants = [_read_constant(operand, kind) for operand in operands[1:]]
    match operator:
        case "IsNull":
            return lambda rows: rows.column(name).is_null()
        case "IsNotNull":
            return lambda rows: rows.column(name).is_valid()
        case _ if operator in _COMPARISONS:
            compare, [constant] = _COMPARISONS[operator], constants
            return lambda rows: compare(rows.column(name), constant)
        case _:
            raise _NotForArrow


def _read_constant(literal: Any, kind: pa.DataType) -> pa.Scalar:
    """Return the value of a literal of type `kind`, in which all values have one order."""
    types = pa.types
    ordered = types.is_integer(kind) or types.is_boolean(kind) or types.is_string(kind)
    if not (ordered or types.is_date32(kind) or types.is_timestamp(kind)):
        raise _NotForArrow
    if literal.variant_name() != "Literal":
        raise _NotForArrow
    value: pa.Scalar = literal.python_value()
    if value.type != kind or not value.is_valid:
        raise _NotForArrow
    return value
