"""The tables of a connector file, except connector options and settings.

    name = "ledger"

    [sources.UID]    connector, its options; watermarks or output_watermarks, dead_letters
    [steps.UID]      input; sql, or filter and select, or key_by with running, over, deduplicate,
                     top_n or window, or lookup_join
    [sinks.UID]      input; connector or url, its options; sink_id, on_bad_row, dead_letters
    [spark]          master, and Spark's own settings without `spark.`

All other tables are settings, under their names in the configuration. Names are those of the
arguments of `Pipeline.read`, `Stream` and `Stream.write`. A stream of a source with several outputs
is named `UID.OUTPUT`, such as `shop.orders`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, get_args

from onceflow.core.errors import ConfigError
from onceflow.core.plan.aggregates import (
    Aggregate,
    avg,
    count,
    count_distinct,
    first,
    last,
    max_,
    min_,
    sum_,
)
from onceflow.core.plan.event_time import WatermarkStrategy
from onceflow.core.plan.lookup_tables import JoinType
from onceflow.core.plan.windows import WindowAssigner
from onceflow.core.plan.work import Emission, Keep, Order, desc
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.options import COUNT, DURATION, NAMES, choice, option
from onceflow.core.state import StateTtlConfig

SECTIONS = ("sources", "steps", "sinks")
NAME_KEY, SPARK, DEAD_LETTERS = "name", "spark", "dead_letters"
WINDOW, LOOKUP_JOIN = "window", "lookup_join"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceKeys:
    """The keys of a source's table in addition to its connector's options."""

    connector: str | None = field(
        default=None,
        metadata=option("The kind of source. Not needed with a url, whose scheme says it"),
    )
    watermarks: WatermarkStrategy | None = field(
        default=None, metadata=option("The column of the records' event time, or a table")
    )
    output_watermarks: Mapping[str, object] | None = field(
        default=None,
        metadata=option(
            "Of a source with several outputs: by output, the column of event time, or a table"
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKeys:
    """The keys of a step's table.

    A step is one of: SQL, filter and select, running, over, deduplicate, top_n, window,
    lookup_join.
    """

    input: tuple[str, ...] | None = field(
        default=None,
        metadata=option(
            "The source or step whose records it reads; several are united. Default: the step"
            " before it, or the only source",
            NAMES,
        ),
    )
    sql: str | None = field(
        default=None, metadata=option("A SELECT from the table `stream`, as in `Stream.sql`")
    )
    filter: str | None = field(
        default=None, metadata=option("A condition in SQL: records for which it is true are kept")
    )
    select: tuple[str, ...] | None = field(
        default=None, metadata=option("Columns or expressions in SQL: `amount * 2 AS twice`", NAMES)
    )
    key_by: tuple[str, ...] | None = field(
        default=None,
        metadata=option(
            "Columns of the key, for running, over, deduplicate, top_n or window", NAMES
        ),
    )
    running: Mapping[str, str] | None = field(
        default=None,
        metadata=option("Running aggregates by the name of their column: `sum(amount)`, `count()`"),
    )
    over: Mapping[str, str] | None = field(
        default=None,
        metadata=option("Aggregates over the last `rows` records of a key, as in running"),
    )
    rows: int | None = field(
        default=None, metadata=option("Of over: the number of records, with the current one")
    )
    ttl: StateTtlConfig | None = field(
        default=None,
        metadata=option(
            "Of running, over and deduplicate: time without a record after which a key starts again"
        ),
    )
    emit: str | None = field(
        default=None,
        metadata=option(
            "Of running and over: every record, or the last one of each key and batch. Default:"
            " record",
            choice(Emission),
        ),
    )
    deduplicate: str | None = field(
        default=None,
        metadata=option("The record of each key that is kept", choice(Keep)),
    )
    top_n: int | None = field(
        default=None, metadata=option("The number of records of each key that are kept")
    )
    by: tuple[str, ...] | None = field(
        default=None,
        metadata=option(
            "The column whose order decides; of top_n and over also several, with the greatest"
            " value first as in `price DESC`. Default: the order of arrival",
            NAMES,
        ),
    )
    rank: str | None = field(
        default=None,
        metadata=option("Of top_n: the column with the rank of a record. Default: rank"),
    )
    aggregate: Mapping[str, str] | None = field(
        default=None, metadata=option("Of window: aggregates by the name of their column")
    )
    time: str | None = field(
        default=None,
        metadata=option(
            "Of window: the column of event time. Default: the column of the watermarks"
        ),
    )
    allowed_lateness: float = field(
        default=0.0,
        metadata=option("Of window: how late a record may arrive", DURATION),
    )
    early_records: int | None = field(
        default=None,
        metadata=option("Of window: the number of records after which results come early"),
    )
    early_interval: float | None = field(
        default=None,
        metadata=option("Of window: how long after a change results come early", DURATION),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupKeys:
    """The keys of the table `lookup_join` of a step, in addition to its connector's options."""

    connector: str | None = field(
        default=None,
        metadata=option("The kind of database. Not needed with a url, whose scheme says it"),
    )
    on: tuple[str, ...] = field(
        metadata=option("Columns that are equal in the records and in the table", NAMES)
    )
    how: JoinType = field(
        default="inner",
        metadata=option("Records without a row are dropped (inner), or get nulls (left)"),
    )
    ttl: float = field(
        default=60.0, metadata=option("How long the rows of a key are kept; 0: not", DURATION)
    )
    keys_max: int = field(
        default=100_000, metadata=option("The number of keys whose rows are kept", COUNT)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkKeys:
    """The keys of a sink's table in addition to its connector's options."""

    input: tuple[str, ...] | None = field(
        default=None,
        metadata=option(
            "The source or step whose records are written; several are united. Default: the last"
            " step, or the only source",
            NAMES,
        ),
    )
    connector: str | None = field(
        default=None,
        metadata=option("The kind of sink. Not needed with a url, whose scheme says it"),
    )
    sink_id: str | None = field(
        default=None,
        metadata=option("The name under which transactions are prepared. Default: job and uid"),
    )
    on_bad_row: OnBadRow = field(
        default=OnBadRow.FAIL,
        metadata=option("What happens to rows that the target can never accept", choice(OnBadRow)),
    )


def _name_window(assigner: type[Any]) -> str:
    """Return `tumbling_event_time` for `TumblingEventTimeWindows`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", assigner.__name__.removesuffix("Windows")).lower()


WINDOWS: Mapping[str, type[Any]] = {
    _name_window(window_type): window_type for window_type in get_args(WindowAssigner)
}
"""The window classes by their names in a file."""

_AGGREGATE = re.compile(
    r"\s*([a-z]+)_?\s*\(\s*([^()]*?)\s*\)\s*(?:filter\s*\(\s*where\s+(.+)\)\s*)?",
    re.IGNORECASE | re.DOTALL,
)
"""A function, its column, and a condition as SQL writes it: `sum(a) FILTER (WHERE b > 1)`."""
_DISTINCT = re.compile(r"distinct\s+", re.IGNORECASE)
_OF_COLUMN = {"sum": sum_, "min": min_, "max": max_, "avg": avg, "first": first, "last": last}


def parse_orders(written: Sequence[str]) -> list[str | Order]:
    """Parse columns that records are ordered by: `price DESC`, `at ASC` or `at`."""
    orders: list[str | Order] = []
    for text in written:
        column, _, direction = text.strip().rpartition(" ")
        match direction.upper():
            case "DESC" if column:
                orders.append(desc(column.strip()))
            case "ASC" if column:
                orders.append(column.strip())
            case _:
                orders.append(text.strip())
    return orders


def parse_aggregates(written: Mapping[str, object], where: str) -> dict[str, Aggregate]:
    """Parse the aggregates in `written`, which maps column name to text.

    Raises:
        ConfigError: A text is not an aggregate. The message has a similar name.
    """
    return {name: _parse_aggregate(text, f"{where}.{name}") for name, text in written.items()}


def _parse_aggregate(text: object, where: str) -> Aggregate:
    match = _AGGREGATE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(
            f"{where}={text!r} is not an aggregate; write, for example, sum(column) or count()"
        )
    function, column, condition = match[1].lower(), match[2].strip("\"'`"), match[3]
    if function == "count":
        if distinct := _DISTINCT.match(match[2]):
            return count_distinct(match[2][distinct.end() :].strip("\"'`"), where=condition)
        if column:
            raise ConfigError(
                f"{where}: count() counts records and takes no column; write count(DISTINCT"
                f" {column}) for the number of different values"
            )
        return count(where=condition)
    known: Sequence[str] = ("count", *_OF_COLUMN)
    if function not in _OF_COLUMN:
        near = get_close_matches(function, known, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{where}: {meant}there are {', '.join(known)}")
    if not column:
        raise ConfigError(f"{where}: {function}(…) needs a column, as in {function}(amount)")
    return _OF_COLUMN[function](column, where=condition)
