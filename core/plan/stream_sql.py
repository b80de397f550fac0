"""SQL over the batches of a stream with DataFusion: projection, filter and unnest of single rows.

The grouping of rows into batches is arbitrary and differs after a restart. So a query may only
compute from one row at a time. The engine's plan is checked node by node. A plan with any other
node (aggregate, sort, limit, join, window, subquery) is refused with an error that names the node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import pyarrow as pa

from onceflow.core.arrow.kinds import holds
from onceflow.core.errors import ConfigError
from onceflow.core.imports import naming_extras
from onceflow.core.plan.arrow_queries import ArrowQuery, translate_query
from onceflow.core.plan.function_arguments import advise_casts, check_arguments
from onceflow.core.plan.integer_overflow import check_integers, computes_integers, resolve_types
from onceflow.core.plan.sql_functions import NamedFunction, QueryFunction, name_functions
from onceflow.core.plan.time_casts import check_time_casts
from onceflow.core.spi.bad_rows import quote_row

_TABLE = "stream"
_ROW_BY_ROW = frozenset({"EmptyRelation", "Filter", "Projection", "SubqueryAlias", "Unnest"})
"""The nodes that a logical plan may have in addition to the scan of the table."""
_PHYSICAL = frozenset(
    {
        *("CoalesceBatchesExec", "CooperativeExec", "DataSourceExec", "EmptyExec", "FilterExec"),
        *("PlaceholderRowExec", "ProjectionExec", "RepartitionExec", "UnnestExec"),
    }
)
"""The nodes that a physical plan may have. It shows subqueries inside expressions."""
_INSTEAD = {
    "Aggregate": "key_by(…).running(…) keeps aggregates of all records of a key",
    "Distinct": "key_by(…).deduplicate(…) keeps one record of each key",
    "Join": "stream.join(dataframe, on=…) joins with a table",
    "Window": "key_by(…).running(…) and process(…) see earlier records of a key",
}
_TEXTS = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|--[^\n]*|/\*.*?\*/""", re.DOTALL)
"""The parts of a query that are no keywords: texts, quoted names, comments."""
_IGNORED = re.compile(
    r"\)\s*(FILTER|OVER)\s*[(\w]|\(\s*(DISTINCT)\b|\b(ORDER\s+BY|WITHIN\s+GROUP|(?:IGNORE|RESPECT)\s+NULLS)\b",
    re.IGNORECASE,
)
"""The clauses of aggregates, which DataFusion ignores in calls of other functions."""


@dataclass(frozen=True)
class StreamSql:
    """A query over a stream of `schema`. Pickles as text; each process creates its own engine."""

    query: str
    schema: pa.Schema
    functions: tuple[NamedFunction, ...] = ()
    """The functions that the query may call in addition to those of DataFusion."""

    def resolve_schema(self) -> pa.Schema:
        """Return the schema of the result.

        Raises:
            ConfigError: The query does not read `stream` or is invalid, it needs several rows at a
                time, an argument of a function would be converted with a loss, a number is cast to
                TIMESTAMP as nanoseconds, or DataFusion is not installed.
        """
        context = self._engine(_make_empty_rows(self.schema))
        try:
            frame = self._plan(context)
        except Exception as error:
            raise self._refuse(error) from error
        self._require_row_by_row(frame)
        check_arguments(context, frame.logical_plan(), self.functions, f"sql({self.query!r})")
        check_time_casts(context, frame.logical_plan(), f"sql({self.query!r})")
        made = _read_schema(context, frame)
        if not made.names:
            raise ConfigError(f"sql({self.query!r}) has no columns")
        return made

    def apply(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the query's result for `rows`, in their order.

        Raises:
            OverflowError: An integer overflows, or a decimal has more digits than its type. The
                message names the expression and both values, or the column and the value.
            ValueError: The query cannot be computed for a record, such as a division by zero. The
                message names the query and the record.
        """
        self._failures.clear()
        try:
            made = None if self._arrow_query is None else self._arrow_query.select(rows)
            if made is None:
                yield from self._run(self._context, rows)
            else:
                yield made
        except OverflowError:
            raise
        except Exception as error:
            # The engine has turned an error of a user's function into text.
            if self._failures:
                raise self._failures[0] from None
            record = quote_row(self._find_failing(rows), 0)
            raise ValueError(f"sql({self.query!r}): {error}; at record {record}") from error

    def _find_failing(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the first row of `rows` for which the query fails, by halving."""
        while rows.num_rows > 1:
            half = rows.num_rows // 2
            try:
                for _ in self._run(self._context, rows.slice(0, half)):
                    pass
            except Exception:
                rows = rows.slice(0, half)
            else:
                rows = rows.slice(half)
        return rows

    def _run(self, context: Any, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        # Plan again for each batch, because a plan holds the rows of its table.
        context.deregister_table(_TABLE)
        context.register_record_batches(_TABLE, [[rows]])
        frame = self._plan(context)
        if self._computes_integers:
            check_integers(context, frame.logical_plan())
        for made in frame.collect():
            _require_digits(made)
            yield made

    def table(self) -> Any:
        """Return the stream as an empty DataFusion table. Raises ConfigError without DataFusion."""
        return self._engine(_make_empty_rows(self.schema)).table(_TABLE)

    @cached_property
    def _computes_integers(self) -> bool:
        return computes_integers(self._context, self._plan(self._context).logical_plan())

    @cached_property
    def _arrow_query(self) -> ArrowQuery | None:
        """The query that Arrow computes in place of the engine, or None."""
        frame = self._plan(self._context)
        plan, optimized = frame.logical_plan(), frame.optimized_logical_plan()
        return translate_query(plan, optimized, self.schema, _read_schema(self._context, frame))

    @cached_property
    def _context(self) -> Any:
        return self._engine(_make_empty_rows(self.schema))

    @cached_property
    def _failures(self) -> list[Exception]:
        """The errors of the user's functions."""
        return []

    def __getstate__(self) -> dict[str, Any]:
        return {"query": self.query, "schema": self.schema, "functions": self.functions}

    def _engine(self, rows: pa.RecordBatch) -> Any:
        with naming_extras():
            datafusion: Any = import_module("datafusion")
        # Use one partition: several partitions run on several threads and return in any order.
        settings = datafusion.SessionConfig().with_target_partitions(1).with_batch_size(65_536)
        # Do not lower-case column names. Spark keeps their case, too.
        settings = settings.set("datafusion.sql_parser.enable_ident_normalization", "false")
        context = datafusion.SessionContext(settings)
        context.register_record_batches(_TABLE, [[rows]])
        for function in self.functions:
            function.register(context, self._failures)
        return context

    def _plan(self, context: Any) -> Any:
        options: Any = import_module("datafusion").SQLOptions()
        options = options.with_allow_ddl(False).with_allow_dml(False).with_allow_statements(False)
        return context.sql_with_options(self.query, options)

    def _require_row_by_row(self, frame: Any) -> None:
        plan = frame.logical_plan()
        names = list(_logical_nodes(plan))
        scans = names.count("TableScan")
        strange = [name for name in names if name not in _ROW_BY_ROW and name != "TableScan"]
        if not strange:
            # Check again after the optimizer, which turns some subqueries into joins.
            names = list(_logical_nodes(self._optimize(frame)))
            strange = [name for name in names if name not in _ROW_BY_ROW and name != "TableScan"]
        if not strange:
            # Check the physical plan, because a logical plan does not show subqueries inside
            # expressions.
            strange = self._strange_physical(frame)
        if strange:
            node = strange[0].removesuffix("Expr").removesuffix("Exec")
            instead = _INSTEAD.get(node, "")
            raise ConfigError(
                f"sql({self.query!r}) needs a plan with {node}, which looks at several rows: which"
                " rows are in one batch is chance, so the result would be, too. Select, filter and"
                f" unnest only{'; ' + instead if instead else ''}"
            )
        if scans != 1:
            raise ConfigError(f"sql({self.query!r}) must read from {_TABLE!r}, once")
        # The plan has no aggregate, window or sort to which such a clause could belong.
        if ignored := _IGNORED.search(_TEXTS.sub("x", self.query)):
            clause = " ".join(next(filter(None, ignored.groups())).upper().split())
            raise ConfigError(
                f"sql({self.query!r}): {clause} has no effect in a call of a function of single"
                " rows. Leave it out; for a condition write CASE WHEN … THEN … END"
            )

    def _optimize(self, frame: Any) -> Any:
        try:
            return frame.optimized_logical_plan()
        except Exception as error:  # the optimizer first finds some types that do not fit
            raise self._refuse(error) from error

    def _refuse(self, error: Exception) -> ConfigError:
        """Return the error for a query that DataFusion does not plan."""
        return ConfigError(
            f"sql({self.query!r}): {error}{advise_casts(str(error), self.functions)}"
        )

    def _strange_physical(self, frame: Any) -> list[str]:
        try:
            names = list(_physical_nodes(frame.execution_plan()))
        except Exception as error:
            raise self._refuse(error) from error
        return [name for name in names if name not in _PHYSICAL]


def select_columns(
    columns: Sequence[str], schema: pa.Schema, functions: Mapping[str, QueryFunction]
) -> StreamSql:
    """Return the query of SQL `columns`, expressions with or without a name."""
    # The line break ends a comment in a column.
    text = "\n, ".join(columns)
    return StreamSql(f"SELECT {text}\nFROM {_TABLE}", schema, name_functions(functions))


def select_conditions(conditions: Sequence[str], schema: pa.Schema) -> StreamSql:
    """Return the query of the SQL `conditions` over a stream of `schema`: a column for each."""
    # The line break ends a comment in a condition.
    columns = ", ".join(f"({text}\n) AS c{number}" for number, text in enumerate(conditions))
    return StreamSql(f"SELECT {columns} FROM {_TABLE}", schema)  # noqa: S608 - the user's own SQL


def require_condition(text: str, schema: pa.Schema, *, owner: str) -> None:
    """Raise ConfigError unless `text` is a SQL condition over one row of `schema`."""
    sql = select_conditions([text], schema)
    try:
        sql.table().parse_sql_expr(text)
    except Exception as error:
        raise ConfigError(f"{owner}: where= is not a SQL condition: {error}") from error
    try:
        kind = sql.resolve_schema().field(0).type
    except ConfigError as error:
        raise ConfigError(f"{owner}: {error}") from error
    if not pa.types.is_boolean(kind):
        raise ConfigError(f"{owner}: where= is a SQL expression of type {kind}, not a condition")


def _require_digits(rows: pa.RecordBatch) -> None:
    """Raise OverflowError if a decimal has more digits than its type.

    DataFusion computes decimals in 128 bits, which can hold some numbers of 39 digits.
    """
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if holds(field.type, pa.types.is_decimal):
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                raise OverflowError(
                    f"column {field.name!r} of the query's result leaves {field.type}: {error}."
                    " Cast its operands to fewer digits first"
                ) from error


def _read_schema(context: Any, frame: Any) -> pa.Schema:
    """Return the schema of a query's result, in the types that sinks support."""
    pairs = zip(frame.schema(), resolve_types(context, frame), strict=True)
    return pa.schema([field.with_type(_plain(kind)) for field, kind in pairs])


def _make_empty_rows(schema: pa.Schema) -> pa.RecordBatch:
    """Return an empty batch."""
    return pa.RecordBatch.from_pylist([], schema)


def _logical_nodes(plan: Any) -> Iterator[str]:
    yield type(plan.to_variant()).__name__
    for below in plan.inputs():
        yield from _logical_nodes(below)


def _physical_nodes(plan: Any) -> Iterator[str]:
    yield plan.display().partition(":")[0].strip()
    for below in plan.children():
        yield from _physical_nodes(below)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the plain type for a view type, which sinks do not support."""
    if kind == pa.string_view():
        return pa.string()
    return pa.binary() if kind == pa.binary_view() else kind
