"""The logical dataflow: operators as the user named them, cut into chains at keyed edges.

Every operator has one input. A chain begins at a source or right after a keyed edge, and holds
every operator that follows without another exchange; its subtask i runs on one thread of slot i.

Invariants:
    uid is unique in a graph; a chain's id is the uid of its first operator
    a sink id is unique in a graph: it says whose a transaction is, and whose staged rows are
    an operator stands after its input in `Graph.operators` and in `Chain.operators`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from onceflow.core.dead_letters import DEAD_LETTERS
from onceflow.core.errors import ConfigError
from onceflow.core.event_time import WatermarkStrategy
from onceflow.core.functions import (
    Aggregate,
    ArrowIteratorFunction,
    KeyedFunction,
    PandasIteratorFunction,
    Record,
)
from onceflow.core.lookup_tables import JoinType, LookupTable
from onceflow.core.protocol.ids import SubtaskRef, sink_id_of
from onceflow.core.spi import OnBadRow, Sink, Source
from onceflow.core.stream_sql import StreamSql

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Of a job and of an operator."""


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """Reads a source."""

    source: Source
    watermarks: WatermarkStrategy | None = None


@dataclass(frozen=True, slots=True)
class MapBatches:
    """Applies a function to whole Arrow record batches."""

    function: Callable[[pa.RecordBatch], pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class MapInArrow:
    """Applies a function of an iterator of Arrow record batches."""

    function: ArrowIteratorFunction


@dataclass(frozen=True, slots=True)
class MapInPandas:
    """Applies a function of an iterator of pandas' DataFrames."""

    function: PandasIteratorFunction


@dataclass(frozen=True, slots=True)
class JoinTable:
    """Adds the columns of a table in memory to each record."""

    table: LookupTable
    how: JoinType


@dataclass(frozen=True, slots=True)
class SelectSql:
    """Replaces each batch by what a query makes of it, row by row."""

    sql: StreamSql


@dataclass(frozen=True, slots=True)
class MapRecords:
    """Applies a function to one record at a time: one in, one out."""

    function: Callable[[Record], Record]


@dataclass(frozen=True, slots=True)
class FlatMapRecords:
    """Applies a function to one record at a time: one in, any number out."""

    function: Callable[[Record], Iterable[Record]]


@dataclass(frozen=True, slots=True)
class FilterRecords:
    """Keeps the records for which a function is true."""

    function: Callable[[Record], Any]


@dataclass(frozen=True, slots=True)
class ProcessKeyed:
    """Applies a keyed function with state."""

    key: tuple[str, ...]
    function: KeyedFunction


@dataclass(frozen=True, slots=True)
class RunAggregates:
    """Adds running aggregates of each key as columns, a whole batch at a time."""

    key: tuple[str, ...]
    aggregates: Mapping[str, Aggregate]


@dataclass(frozen=True, slots=True)
class WriteTo:
    """Writes to a two-phase sink."""

    sink: Sink
    sink_id: str
    on_bad_row: OnBadRow = OnBadRow.FAIL
    takes_dead_letters: bool = False
    """Whether it takes what its input refused, instead of what its input emits."""

    @property
    def key(self) -> tuple[str, ...]:
        """Columns by which rows meet in one subtask; empty when any subtask may write any row."""
        return self.sink.routing_key()


Work: TypeAlias = (
    ReadFrom
    | MapBatches
    | MapInArrow
    | MapInPandas
    | JoinTable
    | SelectSql
    | MapRecords
    | FlatMapRecords
    | FilterRecords
    | ProcessKeyed
    | RunAggregates
    | WriteTo
)


@dataclass(frozen=True, slots=True)
class Operator:
    """One step of the dataflow.

    `schema` is that of its output, `input` the uid of the step before.
    """

    uid: str
    work: Work
    input: str | None
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class Chain:
    """Operators that run together on one thread, and the keyed edges that leave them.

    `input` names the chain that feeds this one through a keyed edge, None for a source; `key` is
    that edge's, empty for a source.
    """

    id: str
    operators: tuple[Operator, ...]
    input: str | None
    input_schema: pa.Schema | None
    key: tuple[str, ...]

    @property
    def head(self) -> Operator:
        """The operator that the chain is named for."""
        return self.operators[0]


@dataclass(frozen=True, slots=True)
class Graph:
    """Every operator of a pipeline, inputs first."""

    operators: tuple[Operator, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for operator in self.operators:
            if operator.uid in seen:
                raise ConfigError(
                    f"uid {operator.uid!r} is used twice; each operator needs one of its own"
                )
            seen.add(operator.uid)
        writers: dict[str, str] = {}
        for operator, work in self.sinks():
            other = writers.setdefault(work.sink_id, operator.uid)
            if other != operator.uid:
                raise ConfigError(
                    f"{other!r} and {operator.uid!r} write under one sink id, {work.sink_id!r}:"
                    " each would commit, roll back and delete the other's rows; give each its own"
                    " (write(…, sink_id=…))"
                )

    def operator(self, uid: str) -> Operator:
        """Return the operator named `uid`."""
        return next(operator for operator in self.operators if operator.uid == uid)

    def sources(self) -> tuple[tuple[str, Source], ...]:
        """Return (uid, source) of every source."""
        return tuple(
            (operator.uid, operator.work.source)
            for operator in self.operators
            if isinstance(operator.work, ReadFrom)
        )

    def sinks(self) -> tuple[tuple[Operator, WriteTo], ...]:
        """Return every sink with its operator."""
        return tuple(
            (operator, operator.work)
            for operator in self.operators
            if isinstance(operator.work, WriteTo)
        )

    def tables(self) -> tuple[LookupTable, ...]:
        """Return every table that a stream is joined with."""
        return tuple(
            operator.work.table
            for operator in self.operators
            if isinstance(operator.work, JoinTable)
        )

    def chains(self) -> tuple[Chain, ...]:
        """Return the chains, upstream first."""
        home: dict[str, str] = {}
        members: dict[str, list[Operator]] = {}
        for operator in self.operators:
            starts = operator.input is None or self._exchange_key(operator)
            home[operator.uid] = chain = operator.uid if starts else home[str(operator.input)]
            members.setdefault(chain, []).append(operator)
        return tuple(
            Chain(
                id=chain,
                operators=tuple(operators),
                input=None if operators[0].input is None else home[operators[0].input],
                input_schema=self._input_schema(operators[0]),
                key=self._exchange_key(operators[0]),
            )
            for chain, operators in members.items()
        )

    def subtasks(self, parallelism: int) -> tuple[frozenset[SubtaskRef], frozenset[SubtaskRef]]:
        """Return (all subtasks, those that read a source) of a run with `parallelism` slots."""
        chains = self.chains()
        everyone = frozenset(SubtaskRef(c.id, i) for c in chains for i in range(parallelism))
        sources = {chain.id for chain in chains if chain.input is None}
        return everyone, frozenset(ref for ref in everyone if ref.chain in sources)

    def _exchange_key(self, operator: Operator) -> tuple[str, ...]:
        """Return by what rows meet before `operator`; empty when they stay where they are."""
        match operator.work:
            case ProcessKeyed(key=key) | RunAggregates(key=key):
                return key
            case WriteTo() as work:
                before = self.operator(str(operator.input)).work
                # Aggregates pass their key columns on as they are: the rows have met already.
                met = isinstance(before, RunAggregates) and before.key == work.key
                return () if met and not work.takes_dead_letters else work.key
            case _:
                return ()

    def _input_schema(self, head: Operator) -> pa.Schema | None:
        if head.input is None:
            return None
        # A sink's schema is that of what it takes, which may be its input's dead letters.
        return head.schema if isinstance(head.work, WriteTo) else self.operator(head.input).schema

    def check_complete(self) -> None:
        """Return when the graph can run.

        Raises:
            ConfigError: There is no source, or rows are computed that go nowhere.
        """
        if not self.sources():
            raise ConfigError("the pipeline reads nothing: call pipeline.read(source, uid=…) first")
        used = {
            operator.input
            for operator in self.operators
            if not (isinstance(operator.work, WriteTo) and operator.work.takes_dead_letters)
        }
        loose = [
            operator.uid
            for operator in self.operators
            if operator.uid not in used and not isinstance(operator.work, WriteTo)
        ]
        if loose:
            raise ConfigError(
                f"nothing takes the output of {', '.join(loose)}: end each stream with"
                " .write(sink, uid=…)"
            )


class GraphBuilder:
    """Takes the operators of one pipeline in the order in which its streams name them."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._operators: list[Operator] = []

    def graph(self) -> Graph:
        """Return what there is so far."""
        return Graph(tuple(self._operators))

    def sink_id(self, uid: str) -> str:
        """Return the sink id of operator `uid` unless the user chooses another one."""
        return sink_id_of(self._job, uid)

    def add(
        self, work: Work, *, verb: str, uid: str | None, after: Operator | None, schema: pa.Schema
    ) -> Operator:
        """Add one operator and return it.

        Raises:
            ConfigError: The uid is in use or not a name.
        """
        name = uid if uid is not None else f"{verb}-{len(self._operators)}"
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"uid={name!r}: use 1-64 letters, digits, '-' and '_', beginning with a letter or"
                " digit"
            )
        operator = Operator(name, work, after.uid if after else None, schema)
        Graph((*self._operators, operator))
        self._operators.append(operator)
        return operator

    def add_dead_letters(self, refusing: Operator, sink: Sink) -> None:
        """Write what `refusing` refuses to `sink`."""
        uid = f"{refusing.uid}-dead-letters"
        work = WriteTo(sink, self.sink_id(uid), takes_dead_letters=True)
        self.add(work, verb="write", uid=uid, after=refusing, schema=DEAD_LETTERS)
