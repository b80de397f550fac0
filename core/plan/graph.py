"""The logical dataflow: the user's operators, divided into chains at each exchange.

An operator has no input (a source), one, or two. Several streams may flow into one input. A chain
starts at a source, after an exchange, or where streams of several chains meet. It contains the
operators that follow, up to the start of the next chain. Subtask i of a chain runs on one thread of
slot i.

Invariants:
    uid is unique in a graph; a chain's id is the uid of its first operator
    a sink id is unique in a graph: it identifies the owner of transactions and staged rows
    in `Graph.operators` and `Chain.operators` an operator stands after its inputs
    all feeds of one input have the same schema, the same kind of exchange and the same key
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.plan.lookup_tables import LookupTable
from onceflow.core.plan.windows import UsedWindows
from onceflow.core.plan.work import JoinTable, ReadFrom, Work, WriteTo
from onceflow.core.protocol.ids import SubtaskRef, sink_id_of
from onceflow.core.spi import Sink, Source
from onceflow.core.spi.dead_letters import DEAD_LETTERS, DEAD_LETTERS_TAG

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""The pattern of a job's name and of an operator's uid."""


@dataclass(frozen=True, slots=True)
class Feed:
    """The rows that leave operator `uid`: its output, or the side output `tag`."""

    uid: str
    schema: pa.Schema
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class Operator:
    """A step of the dataflow.

    `schema` is the schema of its output. `inputs` has the feeds of each input. An input has several
    feeds of the same schema if it is a union of streams.
    """

    uid: str
    work: Work
    inputs: tuple[tuple[Feed, ...], ...]
    schema: pa.Schema

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """The feeds of all inputs."""
        return tuple(feed for feeds in self.inputs for feed in feeds)

    @property
    def input_schema(self) -> pa.Schema:
        """The schema of its first input."""
        return self.inputs[0][0].schema


class Exchange(Enum):
    """The rule that determines which subtask of a chain gets a row."""

    FORWARD = "forward"
    """The subtask with the same number."""
    BY_KEY = "by_key"
    """The subtask that owns the row's key group."""
    BROADCAST = "broadcast"
    """Every subtask."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The connection of `feed` to an input of a chain's first operator."""

    feed: Feed
    above: str
    """The chain of the operator that `feed` leaves."""
    input: int
    exchange: Exchange
    key: tuple[str, ...]
    """The columns of the key; empty if the exchange is not by key."""
    has_event_time: bool
    """True if the edge carries watermarks."""

    def channels(self, parallelism: int) -> int:
        """Return the number of upstream subtasks from which one subtask gets rows."""
        return 1 if self.exchange is Exchange.FORWARD else parallelism


@dataclass(frozen=True, slots=True)
class Chain:
    """Operators that run on one thread, and their input edges. A source has no edges.

    The channels of a subtask are those of its edges, in the order of `edges`.
    """

    id: str
    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...]

    @property
    def head(self) -> Operator:
        """The first operator, whose uid is the chain's id."""
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
        # A side output is identified by its name only: two tags of one name would share a channel.
        tags: dict[tuple[str, str | None], pa.Schema] = {}
        for feed in (feed for operator in self.operators for feed in operator.feeds):
            schema = tags.setdefault((feed.uid, feed.tag), feed.schema)
            if schema != feed.schema:
                raise ConfigError(
                    f"side output {feed.tag!r} of operator {feed.uid!r} is used with columns"
                    f" {schema} and with columns {feed.schema}: give each OutputTag its own name"
                )
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

    def sources_of(self, uid: str) -> frozenset[str]:
        """Return the uids of all sources whose records flow into operator `uid`."""
        operator = self.operator(uid)
        if isinstance(operator.work, ReadFrom):
            return frozenset({uid})
        return frozenset[str]().union(*(self.sources_of(feed.uid) for feed in operator.feeds))

    def makes_last_rows(self) -> bool:
        """Return True if a function may emit rows at the end of its input."""
        return any(operator.work.makes_last_rows for operator in self.operators)

    def sinks(self) -> tuple[tuple[Operator, WriteTo], ...]:
        """Return every sink with its operator."""
        return tuple(
            (operator, operator.work)
            for operator in self.operators
            if isinstance(operator.work, WriteTo)
        )

    def tables(self) -> tuple[LookupTable, ...]:
        """Return the lookup tables of all joins."""
        return tuple(
            operator.work.table
            for operator in self.operators
            if isinstance(operator.work, JoinTable)
        )

    def chains(self) -> tuple[Chain, ...]:
        """Return the chains, upstream first."""
        # Operators come after their inputs, so the chains of an operator's inputs are already
        # known. The operator joins their chain if there is only one and no exchange in between.
        home: dict[str, str] = {}
        members: dict[str, list[Operator]] = {}
        for operator in self.operators:
            above = {home[feed.uid] for feed in operator.feeds}
            stays = (
                not operator.work.starts_chain
                and len(above) == 1
                and all(
                    self._exchange(operator, number)[0] is Exchange.FORWARD
                    for number in range(len(operator.inputs))
                )
            )
            home[operator.uid] = chain = above.pop() if stays else operator.uid
            members.setdefault(chain, []).append(operator)
        timed = self._with_event_time()
        return tuple(
            Chain(chain, tuple(operators), self._edges(operators[0], home, timed))
            for chain, operators in members.items()
        )

    def _edges(
        self, head: Operator, home: Mapping[str, str], timed: Collection[str]
    ) -> tuple[Edge, ...]:
        return tuple(
            Edge(feed, home[feed.uid], number, *self._exchange(head, number), feed.uid in timed)
            for number, feeds in enumerate(head.inputs)
            for feed in feeds
        )

    def subtasks(self, parallelism: int) -> tuple[frozenset[SubtaskRef], frozenset[SubtaskRef]]:
        """Return all subtasks and the source subtasks of a run with `parallelism` slots."""
        chains = self.chains()
        everyone = frozenset(SubtaskRef(c.id, i) for c in chains for i in range(parallelism))
        # A chain without edges starts at a source, because only sources have no input.
        sources = {chain.id for chain in chains if not chain.edges}
        return everyone, frozenset(ref for ref in everyone if ref.chain in sources)

    def _exchange(self, operator: Operator, number: int) -> tuple[Exchange, tuple[str, ...]]:
        """Return the exchange and the key of input `number` of `operator`."""
        work = operator.work
        if work.is_broadcast(number):
            return Exchange.BROADCAST, ()
        key = work.input_key(number)
        if isinstance(work, WriteTo) and self._have_met(operator, work):
            key = ()
        return (Exchange.BY_KEY if key else Exchange.FORWARD), key

    def _have_met(self, operator: Operator, work: WriteTo) -> bool:
        """Return True if the rows of each sink key already come from one subtask."""
        feeds = operator.feeds
        if work.takes_dead_letters or len(feeds) != 1:
            return False
        return self.operator(feeds[0].uid).work.output_key == work.key

    def _with_event_time(self) -> frozenset[str]:
        """Return the uids of the operators that emit watermarks."""
        timed: set[str] = set()
        for operator in self.operators:
            begins = isinstance(operator.work, ReadFrom) and bool(operator.work.watermarks)
            # One input with event time is enough: the watermark is the lowest of the inputs that
            # have one.
            if begins or any(feed.uid in timed for feed in operator.feeds):
                timed.add(operator.uid)
        return frozenset(timed)

    def check_complete(self) -> None:
        """Raise ConfigError if the graph is incomplete.

        Raises:
            ConfigError: There is no source, or the output of an operator is not used.
        """
        if not self.sources():
            raise ConfigError("the pipeline reads nothing: call pipeline.read(source, uid=…) first")
        used = {
            feed.uid
            for operator in self.operators
            if not (isinstance(operator.work, WriteTo) and operator.work.takes_dead_letters)
            for feed in operator.feeds
        }
        loose = [
            operator.uid
            for operator in self.operators
            if operator.uid not in used and not isinstance(operator.work, WriteTo)
        ]
        if loose:
            raise ConfigError(
                f"no operator or sink reads the output of {', '.join(loose)}: end each stream"
                " with .write(sink, uid=…)"
            )


class GraphBuilder:
    """The builder of a graph. Streams add operators in the order of the user's calls."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._operators: list[Operator] = []

    def graph(self) -> Graph:
        """Return the graph of the operators so far."""
        return Graph(tuple(self._operators))

    def sink_id(self, uid: str) -> str:
        """Return the default sink id of operator `uid`."""
        return sink_id_of(self._job, uid)

    def event_time_of(self, feeds: Sequence[Feed]) -> frozenset[str]:
        """Return the event-time columns of the sources that `feeds` come from."""
        return frozenset(
            operator.work.watermarks[feed.tag].column
            for feed, operator in self._list_before(feeds)
            if isinstance(operator.work, ReadFrom) and feed.tag in operator.work.watermarks
        )

    def windows_of(self, feeds: Sequence[Feed]) -> tuple[UsedWindows, ...]:
        """Return the windows of all operators before `feeds`."""
        windows = (operator.work.used_windows for _, operator in self._list_before(feeds))
        return tuple(used for used in windows if used is not None)

    def _list_before(self, feeds: Sequence[Feed]) -> Iterator[tuple[Feed, Operator]]:
        """Yield `feeds` and all feeds of the operators before them, each with its operator."""
        graph = self.graph()
        seen: set[tuple[str, str | None]] = set()
        # Use a stack instead of recursion: a program may have more operators than the recursion
        # limit.
        waiting = list(feeds)
        while waiting:
            feed = waiting.pop()
            if (feed.uid, feed.tag) in seen:
                continue
            seen.add((feed.uid, feed.tag))
            operator = graph.operator(feed.uid)
            waiting += operator.feeds
            yield feed, operator

    def add(
        self,
        work: Work,
        *inputs: tuple[Feed, ...],
        uid: str | None,
        schema: pa.Schema,
    ) -> Operator:
        """Add an operator with the feeds of each of its inputs, and return it.

        Raises:
            ConfigError: The uid is in use or invalid.
        """
        # The default name has the operator's position. It stays the same if operators are only
        # added after it. State is found by this name, so the documentation advises a uid for
        # operators with state.
        name = uid if uid is not None else f"{work.uid_prefix}-{len(self._operators)}"
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"uid={name!r}: use 1-64 letters, digits, '-' and '_', beginning with a letter or"
                " digit"
            )
        operator = Operator(name, work, inputs, schema)
        # Building the graph checks it, so that an error is raised by the user's call that caused
        # it.
        Graph((*self._operators, operator))
        self._operators.append(operator)
        return operator

    def add_dead_letters(self, refusing: Operator, sink: Sink) -> None:
        """Write the dead letters of operator `refusing` to `sink`."""
        uid = f"{refusing.uid}-dead-letters"
        work = WriteTo(sink, self.sink_id(uid), takes_dead_letters=True)
        letters = (Feed(refusing.uid, DEAD_LETTERS, DEAD_LETTERS_TAG),)
        self.add(work, letters, uid=uid, schema=DEAD_LETTERS)
