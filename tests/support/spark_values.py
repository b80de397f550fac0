"""Columns of Spark's types with the edges of their values, made by SQL alone.

The JVM makes each value from a whole number, from octets or from a text of digits, so that no
client, session time zone or Arrow conversion has a part in what a test writes. What the values are
is known in the form of `tests.support.exact_values`:

    table = spark_table(spark, SCALARS + NESTED)
    table.frame.write…
    assert same(what_a_client_reads, table.values["c0"])
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support import edge_values
from tests.support.exact_values import Clock, Instant, Span, exact_values

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ZONE = "America/New_York"
"""The time zone of sessions that write and read: one that skips and repeats an hour each year."""
INT96_FIRST = -210_866_716_800_000_000
INT96_LAST = 2**63 - 1 - 210_866_803_200_000_000
"""The microseconds since 1970 that INT96 keeps from Spark to Arrow."""
_ZONE_SETTING = "spark.sql.session.timeZone"
_SETTING_OF_TIME = "spark.sql.timeType.enabled"
"""Without this setting Spark refuses its type TIME."""


@dataclass(frozen=True)
class SparkColumn:
    """A column of one type of Spark's, with the edges of its values, and null as the last one."""

    name: str
    """The type in SQL, or a shape and a type in SQL; the test's id."""
    type: str
    """The type in SQL."""
    expressions: Sequence[str]
    """An expression of SQL for each value."""
    values: Sequence[object]
    """The values in their exact form."""
    expression: str = "{scalar}"
    """The column in SQL, where `{scalar}` stands for the column of its scalar."""
    scalar: str = ""
    """The name of the scalar inside of a shape."""

    @property
    def around_null(self) -> object:
        """Return the column's value where its scalar is null."""
        return self.values[-1]


# --- scalars ------------------------------------------------------------------------------------


def _cast(kind: str) -> Callable[[Any], str]:
    return lambda value: f"CAST('{value}' AS {kind})"


def _decimal(kind: str) -> Callable[[Any], str]:
    return lambda value: f"CAST('{value:f}' AS {kind})"


def _float(value: Any) -> str:
    # Every float is a double, and the cast back finds it again.
    return f"CAST(CAST('{value!r}' AS DOUBLE) AS FLOAT)"


def _double(value: Any) -> str:
    return f"CAST('{value!r}' AS DOUBLE)"


def _text(value: Any) -> str:
    return f"CAST(X'{value.encode().hex()}' AS STRING)"


def _octets(value: Any) -> str:
    return f"X'{value.hex()}'"


def _date(value: Any) -> str:
    return f"date_from_unix_date(CAST('{value.days}' AS INT))"


def _instant(value: Any) -> str:
    return f"timestamp_micros(CAST('{value.nanoseconds // 1_000}' AS BIGINT))"


def _local(value: Any) -> str:
    # Of a session in UTC: see `spark_table`.
    return f"CAST({_instant(value)} AS TIMESTAMP_NTZ)"


_FROM_ARROW: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("TINYINT", "int8", _cast("TINYINT")),
    ("SMALLINT", "int16", _cast("SMALLINT")),
    ("INT", "int32", _cast("INT")),
    ("BIGINT", "int64", _cast("BIGINT")),
    ("FLOAT", "float", _float),
    ("DOUBLE", "double", _double),
    *(
        (f"DECIMAL({digits}, {scale})", f"decimal128({digits}, {scale})",
         _decimal(f"DECIMAL({digits}, {scale})"))
        for digits, scale in ((1, 0), (5, 2), (20, 4), (38, 0), (38, 10), (38, 38))
    ),
    ("BOOLEAN", "bool", _cast("BOOLEAN")),
    ("STRING", "string", _text),
    ("BINARY", "binary", _octets),
    ("DATE", "date32[day]", _date),
    ("TIMESTAMP", "timestamp[us, tz=UTC]", _instant),
    ("TIMESTAMP_NTZ", "timestamp[us]", _local),
)  # fmt: skip
"""A type of Spark's, the column of the catalogue that has its values, and a value as SQL."""
_EDGES = {edge.name: edge for edge in edge_values.SCALARS}


def _is_beyond_int96(value: object) -> bool:
    return isinstance(value, Instant) and not (
        INT96_FIRST <= value.nanoseconds // 1_000 <= INT96_LAST
    )


def _from_arrow(kind: str, edge: str, write: Callable[[Any], str]) -> SparkColumn:
    values = [value for value in exact_values(_EDGES[edge].values) if not _is_beyond_int96(value)]
    expressions = [f"CAST(NULL AS {kind})" if value is None else write(value) for value in values]
    return SparkColumn(kind, kind, expressions, values, scalar=kind)


def _spans() -> SparkColumn:
    kind = "INTERVAL DAY TO SECOND"
    texts = {
        "0 00:00:00.000001": 1,
        "-0 00:00:00.000001": -1,
        "40 00:00:01": (40 * 86_400 + 1) * 10**6,
        "106751991 04:00:54.775807": 2**63 - 1,
        "-106751991 04:00:54.775808": -(2**63),
    }
    values = [Span(microseconds * 1_000) for microseconds in texts.values()]
    expressions = [f"INTERVAL '{text}' DAY TO SECOND" for text in texts]
    return SparkColumn(
        kind, kind, [*expressions, f"CAST(NULL AS {kind})"], [*values, None], scalar=kind
    )


def _clocks() -> SparkColumn:
    kind = "TIME(6)"
    texts = {"00:00:00": 0, "00:00:00.000001": 1, "23:59:59.999999": 86_400 * 10**6 - 1}
    values = [Clock(microseconds * 1_000) for microseconds in texts.values()]
    expressions = [f"CAST('{text}' AS {kind})" for text in texts]
    return SparkColumn(
        kind, kind, [*expressions, f"CAST(NULL AS {kind})"], [*values, None], scalar=kind
    )


def _beyond_int96() -> SparkColumn:
    name, kind = "TIMESTAMP beyond INT96", "TIMESTAMP"
    ends = (-(2**63), INT96_FIRST - 86_400 * 10**6, INT96_FIRST - 1, INT96_LAST + 1, 2**63 - 1)
    values = [Instant(microseconds * 1_000) for microseconds in ends]
    expressions = [*map(_instant, values), "CAST(NULL AS TIMESTAMP)"]
    return SparkColumn(name, kind, expressions, [*values, None], scalar=name)


SCALARS: tuple[SparkColumn, ...] = tuple(_from_arrow(*column) for column in _FROM_ARROW)
"""The types that batches of every path take."""
BEYOND_INT96 = _beyond_int96()
"""Times that a DataFrame as a source refuses."""
TIMES: tuple[SparkColumn, ...] = (_spans(), _clocks())
"""Types that some targets refuse by name."""


# --- shapes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """A shape around a value: in SQL, in the type, and in the exact form."""

    type: str
    expression: str
    """`{v}` stands for the value, `{t}` for its type."""
    wrap: Callable[[object], object]
    empty: str
    """The shape without a value, in SQL."""
    without_value: object


_SHAPES: dict[str, _Shape] = {
    "array": _Shape(
        "ARRAY<{t}>",
        "array({v}, CAST(NULL AS {t}), {v})",
        lambda value: [value, None, value],
        "CAST(array() AS ARRAY<{t}>)",
        [],
    ),
    "struct": _Shape(
        "STRUCT<a: {t}, `B b`: INT>",
        "named_struct('a', {v}, 'B b', 7)",
        lambda value: {"a": value, "B b": 7},
        "named_struct('a', CAST(NULL AS {t}), 'B b', CAST(NULL AS INT))",
        {"a": None, "B b": None},
    ),
    "map": _Shape(
        "MAP<STRING, {t}>",
        "map('é', {v}, '', CAST(NULL AS {t}))",
        lambda value: {"é": value, "": None},
        "CAST(map() AS MAP<STRING, {t}>)",
        {},
    ),
}


def put_around(shape: str, column: SparkColumn) -> SparkColumn:
    """Return `column` inside of `shape`: its first value gives way to null, its second to none.

    The expressions are of the column that a table has of the scalar.
    """
    outer = _SHAPES[shape]
    kind = outer.type.replace("{t}", column.type)
    around = outer.expression.replace("{v}", column.expression).replace("{t}", column.type)
    empty = outer.empty.replace("{t}", column.type)
    cases = f"WHEN n = 0 THEN CAST(NULL AS {kind}) WHEN n = 1 THEN {empty} ELSE {around}"
    values = [None, outer.without_value, *map(outer.wrap, column.values[2:])]
    return SparkColumn(
        f"{shape} of {column.name}", kind, (), values, f"CASE {cases} END", column.scalar
    )


ARRAYS: tuple[SparkColumn, ...] = tuple(
    put_around("array", column)
    for column in SCALARS
    if column.name in ("BIGINT", "DOUBLE", "STRING", "BINARY", "DATE", "TIMESTAMP_NTZ")
)
"""What Postgres takes, too."""
NESTED: tuple[SparkColumn, ...] = (
    *ARRAYS,
    *(
        put_around(shape, column)
        for shape in ("struct", "map")
        for column in SCALARS
        if column.name in ("DOUBLE", "DECIMAL(38, 10)", "BINARY", "TIMESTAMP")
    ),
    *(
        put_around(outer, put_around(inner, column))
        for outer in _SHAPES
        for inner in _SHAPES
        for column in SCALARS
        if column.name in ("DATE", "TIMESTAMP")
    ),
)
"""Shapes of one level around several types, and of two levels around two of them."""
_SHORT_NAMES = frozenset(
    {"array of STRING", "map of TIMESTAMP", "struct of DECIMAL(38, 10)"}
    | {"array of struct of TIMESTAMP", "struct of map of DATE", "map of array of TIMESTAMP"}
)
SHORT: tuple[SparkColumn, ...] = (
    *SCALARS,
    *(column for column in NESTED if column.name in _SHORT_NAMES),
)
"""The columns of the default run."""


# --- tables -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SparkTable:
    """A DataFrame of columns `c0`, `c1`, …, whose rows are numbered by `n`."""

    frame: DataFrame
    columns: Sequence[SparkColumn]
    row_count: int

    @property
    def values(self) -> dict[str, list[object]]:
        """The values of each column in the order of `n`; shorter columns go on with null."""
        return {
            f"c{at}": [
                *column.values,
                *[column.around_null] * (self.row_count - len(column.values)),
            ]
            for at, column in enumerate(self.columns)
        }

    def one_value_a_row(self) -> tuple[DataFrame, dict[int, tuple[int, object]]]:
        """Return the same values, each in a row of its own, and where each row's value stands.

        A row that a target refuses then says nothing about another value. The rows' places are
        given as the number of the column and the value.
        """
        count, most = len(self.columns), self.row_count
        chosen = [f"IF(k = {at}, c{at}, NULL) AS c{at}" for at in range(count)]
        exploded = self.frame.selectExpr("*", f"explode(sequence(0, {count - 1})) AS k")
        rows = exploded.selectExpr(f"CAST(k * {most} + n AS BIGINT) AS n", *chosen)
        lengths = [f"{at * most + len(column.values)}" for at, column in enumerate(self.columns)]
        bounds = " OR ".join(f"(n >= {at * most} AND n < {end})" for at, end in enumerate(lengths))
        places = {
            at * most + row: (at, value)
            for at, column in enumerate(self.columns)
            for row, value in enumerate(column.values)
        }
        return rows.where(bounds), places


def spark_table(spark: SparkSession, columns: Sequence[SparkColumn]) -> SparkTable:
    """Return a DataFrame of `columns`, whose values the JVM makes when it is evaluated."""
    used = {column.scalar for column in columns}
    scalars = {one.name: one for one in (*SCALARS, *TIMES, BEYOND_INT96) if one.name in used}
    count = max(len(scalar.values) for scalar in scalars.values())
    padded = [
        [*scalar.expressions, *[f"CAST(NULL AS {scalar.type})"] * (count - len(scalar.expressions))]
        for scalar in scalars.values()
    ]
    rows = ", ".join(
        f"({number}, {', '.join(expressions)})"
        for number, *expressions in zip(range(count), *padded, strict=True)
    )
    names = {name: f"s{at}" for at, name in enumerate(scalars)}
    shown = ", ".join(
        f"{column.expression.replace('{scalar}', names[column.scalar])} AS c{at}"
        for at, column in enumerate(columns)
    )
    # A local time is cast from an instant, and the zone of the cast is that of the session now.
    with session_zone(spark, "UTC"):
        values = f"VALUES {rows} AS t({', '.join(['n', *names.values()])})"
        frame = spark.sql(f"SELECT n, {shown} FROM {values}")
    return SparkTable(frame, columns, count)


@contextmanager
def session_zone(spark: SparkSession, zone: str) -> Generator[None, None, None]:
    """Change the session's time zone for a while, and allow the type TIME."""
    with (
        session_setting(spark, _ZONE_SETTING, zone),
        session_setting(spark, _SETTING_OF_TIME, "true"),
    ):
        yield


@contextmanager
def session_setting(spark: SparkSession, name: str, value: str) -> Generator[None, None, None]:
    """Change a setting of the session for a while."""
    before = spark.conf.get(name, None)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, before)
