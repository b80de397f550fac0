"""The errors for users' mistakes: checks of functions, and tracebacks that end at the user's call.

They run when the pipeline is built. A wrong argument fails here with an error that names it, not
later in a slot with an AttributeError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TypeVar

import pyarrow as pa
from typing_extensions import ParamSpec

from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.plan import process_functions
from onceflow.core.plan.aggregates import Aggregate
from onceflow.core.plan.functions import KeyedBatchFunction, KeyedFunction
from onceflow.core.plan.join_functions import ProcessJoinFunction
from onceflow.core.plan.window_batches import CoGroupBatchFunction
from onceflow.core.plan.window_functions import CoGroupFunction, ProcessWindowFunction
from onceflow.core.plan.work import Order
from onceflow.core.state.keys.key_columns import check_key_type, check_rows_can_be_divided

_P = ParamSpec("_P")
_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_WITH_ORDER: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_timestamp,
)
"""The types whose values have an order that every user expects."""


def without_internal_frames(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap `call`, so that its errors of domain "user" have no traceback frames of the engine.

    The error keeps its causes. A DEBUG log line has the whole traceback.
    """

    @wraps(call)
    def with_short_traceback(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return call(*args, **kwargs)
        except OnceflowError as error:
            if error.domain != "user":
                raise
            _log.debug("the whole traceback of a user's mistake", exc_info=True)
            mistake = error
        raise mistake.with_traceback(None) from _shorten_cause(mistake)

    return with_short_traceback


def _shorten_cause(error: BaseException) -> BaseException | None:
    """Return the first cause of another type, and remove the tracebacks of it and its causes."""
    cause = error.__cause__
    while cause is not None and type(cause) is type(error):
        cause = cause.__cause__
    below = cause
    while below is not None:
        below.__traceback__ = None
        below.__suppress_context__ = True
        below = below.__cause__
    return cause


_METHODS: dict[type[object], str] = {
    process_functions.ProcessFunction: "process() of a stream without a key",
    KeyedFunction: "key_by(…).process()",
    KeyedBatchFunction: "key_by(…).process_batches()",
    process_functions.CoProcessFunction: "connect(…).key_by(…).process()",
    process_functions.BroadcastProcessFunction: "connect(broadcast).process()",
    ProcessWindowFunction: "key_by(…).window(…).process()",
    CoGroupFunction: "connect(…).key_by(…).window(…).co_group()",
    CoGroupBatchFunction: "connect(…).key_by(…).window(…).co_group_batches()",
    ProcessJoinFunction: "process() of a join",
}


def require_function(function: object, method: str) -> None:
    """Raise ConfigError if `function`, an argument of `method`, is not callable."""
    if not callable(function):
        raise ConfigError(
            f"{method}() takes a function, and was given {_describe(function)}{_advice(function)}"
        )


def require_function_object(function: object, expected: type[object], method: str) -> None:
    """Raise ConfigError if `function` is not an instance of `expected`, which `method` needs."""
    if isinstance(function, expected):
        return
    name, given = expected.__name__, _describe(function)
    if _is_subclass(function, expected):
        raise ConfigError(
            f"{method}() takes an object, and was given {given} itself: say"
            f" {given.removeprefix('the class ')}(…)"
        )
    advice = _advice(function)
    if not advice and callable(function):
        advice = f"; write a class of {name} whose methods say what it does"
        if expected is process_functions.ProcessFunction or expected is KeyedFunction:
            advice += ", or pass the function to map() or flat_map()"
    raise ConfigError(
        f"{method}() takes an object of a class of {name}, and was given {given}{advice}"
    )


def _is_subclass(given: object, expected: type[object]) -> bool:
    return isinstance(given, type) and issubclass(given, expected)


def require_aggregates(aggregates: Mapping[str, object], method: str) -> None:
    """Raise ConfigError if `method` has no argument, or one that is not an aggregate."""
    if not aggregates:
        raise ConfigError(f"{method}() needs at least one aggregate, such as total=sum_('amount')")
    for name, aggregate in aggregates.items():
        if not isinstance(aggregate, Aggregate):
            raise ConfigError(
                f"{method}({name}=…) takes an aggregate, such as sum_('amount') or count(), and was"
                f" given {_describe(aggregate)}"
            )


def require_order(column: str, schema: pa.Schema, key: Sequence[str], method: str) -> None:
    """Raise ConfigError if the records of one key cannot be ordered by `column`."""
    if column not in schema.names:
        raise ConfigError(
            f"{method}(by={column!r}): no such column; there are {', '.join(schema.names)}"
        )
    if column in key:
        raise ConfigError(
            f"{method}(by={column!r}): the column is part of the key, so it is equal in all records"
            " of a key; give another column"
        )
    kind = schema.field(column).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(has_order(plain) for has_order in _WITH_ORDER):
        raise ConfigError(
            f"{method}(by={column!r}): values of type {kind} have no order; give a column of"
            " numbers, decimals, text, bytes, dates, times or timestamps"
        )


def require_key(columns: Sequence[str], schema: pa.Schema) -> None:
    """Raise ConfigError unless `columns` of `schema` can be the key of a stream."""
    if not columns:
        raise ConfigError("key_by() needs at least one column")
    for column in columns:
        if column not in schema.names:
            raise ConfigError(
                f"key_by({column!r}): no such column; there are {', '.join(schema.names)}"
                f"{_advise_on_nested_key(column, schema)}"
            )
        check_key_type(schema.field(column).type, column)
    check_rows_can_be_divided(schema)


def _advise_on_nested_key(column: str, schema: pa.Schema) -> str:
    """Return a hint how to key by a struct's field if `column` is "column.field", or ""."""
    outer, dot, field = column.partition(".")
    if not dot or outer not in schema.names or not pa.types.is_struct(schema.field(outer).type):
        return ""
    path = "".join(f"[{part!r}]" for part in field.split("."))
    name = column.replace(".", "_")
    select = f"SELECT *, {outer}{path} AS {name} FROM stream"  # noqa: S608 - only shown
    return (
        f". A key is a column, and {field!r} is a field of column {outer!r}: make it a column"
        f' before, such as .sql("{select}").key_by({name!r})'
    )


def _describe(given: object) -> str:
    if isinstance(given, type):
        return f"the class {given.__name__}"
    name = getattr(given, "__name__", None)
    return f"the function {name}" if callable(given) and name else f"{given!r:.80}"


def _advice(function: object) -> str:
    """Return a hint at the method that takes `function`, or "" if there is none."""
    for kind, method in _METHODS.items():
        if isinstance(function, kind):
            return f", a {kind.__name__}: that is for {method}"
    return ""


def read_orders(
    by: str | Order | Sequence[str | Order], schema: pa.Schema, key: Sequence[str], method: str
) -> tuple[Order, ...]:
    """Return the orders that the user gave as `by`.

    Raises:
        ConfigError: There is none, or the records of one key cannot be ordered by a column.
    """
    given = [by] if isinstance(by, str | Order) else by
    orders = tuple(Order(order) if isinstance(order, str) else order for order in given)
    if not orders:
        raise ConfigError(f"{method}(by=[]): give at least one column, as in by=desc('price')")
    for order in orders:
        require_order(order.column, schema, key, method)
    return orders
