"""Builds the subtasks of one slot: operators with their state, gates, channels and edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import flight

from onceflow.core.compiled import CompiledFunction
from onceflow.core.crash_points import reach
from onceflow.core.errors import SlotLost, StateIncompatible
from onceflow.core.plan.graph import (
    AggregateWindows,
    Chain,
    Edge,
    Exchange,
    FilterRecords,
    FlatMapRecords,
    JoinConnected,
    JoinTable,
    MapBatches,
    MapInArrow,
    MapInPandas,
    MapRecords,
    Operator,
    ProcessBatches,
    ProcessBroadcast,
    ProcessConnected,
    ProcessKeyed,
    ProcessRecords,
    ReadFrom,
    RunAggregates,
    SelectSql,
    WriteTo,
)
from onceflow.core.plan.windows import EventTimeSessionWindows
from onceflow.core.protocol.checkpoints.alignment import AlignmentMode
from onceflow.core.protocol.checkpoints.in_flight import ChannelEnd
from onceflow.core.protocol.ids import SubtaskRef
from onceflow.core.protocol.messages import Deploy, RestoredOperator
from onceflow.core.protocol.splits import key_group_range
from onceflow.core.runtime.dataflow import function_operators
from onceflow.core.runtime.dataflow.batch_iterators import ArrowFunction, PandasFunction
from onceflow.core.runtime.dataflow.channels import (
    Batch,
    CollectedChannel,
    InputGate,
    LocalChannel,
    OutputChannel,
    decode_batches,
    join_batches,
)
from onceflow.core.runtime.dataflow.compiled_operator import CompiledProcessor
from onceflow.core.runtime.dataflow.join_operators import JoinOperator
from onceflow.core.runtime.dataflow.keyed_operators import AggregateRunner, KeyedOperator
from onceflow.core.runtime.dataflow.lookup_join import LookupJoiner
from onceflow.core.runtime.dataflow.operator_descriptions import describe_operator
from onceflow.core.runtime.dataflow.operators import (
    BatchIteratorMapper,
    BatchMapper,
    RecordFilter,
    RecordMapper,
    RunningOperator,
    SqlMapper,
)
from onceflow.core.runtime.dataflow.partitioners import (
    BroadcastPartitioner,
    ForwardPartitioner,
    KeyGroupPartitioner,
    Partitioner,
    SinkPartitioner,
)
from onceflow.core.runtime.dataflow.restored_event_time import EVENT_TIME, RestoredEventTime
from onceflow.core.runtime.dataflow.session_operators import SessionAggregator
from onceflow.core.runtime.dataflow.sink_operator import SinkOperator
from onceflow.core.runtime.dataflow.source_operator import SPLITS, SourceOperator, decode_split
from onceflow.core.runtime.dataflow.subtask import (
    LeavingEdge,
    ReceivingSubtask,
    SourceSubtask,
    Subtask,
)
from onceflow.core.runtime.dataflow.window_joins import connect_streams
from onceflow.core.runtime.dataflow.window_operators import WindowAggregator
from onceflow.core.runtime.slot.commits import SlotCommits
from onceflow.core.runtime.slot.context import SlotContext
from onceflow.core.runtime.slot.program import Program
from onceflow.core.runtime.transport.data_plane import FlightChannel, SlotIdentity
from onceflow.core.settings.pipeline_settings import Delivery
from onceflow.core.spi import ReaderContext, WriterContext
from onceflow.core.state import KeyedStateStore, StateContext
from onceflow.core.state.states.operator_state import OperatorStateStore


@dataclass(frozen=True, slots=True)
class Chains:
    """The parts that a slot runs, built and with restored state, but not started."""

    subtasks: tuple[Subtask, ...]
    channels: tuple[OutputChannel, ...]
    commits: SlotCommits
    dropped: tuple[str, ...]
    """Descriptions of restored state that no operator uses, for messages."""


class ChainBuilder:
    """Builds every subtask of one slot from the program and the state in `deploy`."""

    def __init__(self, context: SlotContext, program: Program, deploy: Deploy) -> None:
        self._context = context
        self._plan = context.plan
        self._backend = program.backend
        self._deploy = deploy
        self._chains = program.graph.chains()
        self._commits = SlotCommits(context)
        self._clients: dict[int, flight.FlightClient] = {}
        self.channels: list[OutputChannel] = []
        """The channels that were opened, also those of a build that failed."""
        self._dropped: list[str] = []
        self.gates: dict[str, InputGate] = {
            chain.id: InputGate(self._ends(chain), self._plan.settings.channel_batches)
            for chain in self._chains
            if chain.edges
        }

    def build(self) -> Chains:
        """Return the chains with restored state and connected channels, not started.

        `gates` must be served to the other slots before this call.

        Raises:
            SlotLost: The slot shuts down, or a channel cannot be opened.
        """
        edges = {chain.id: self._partitioners(chain) for chain in self._chains}
        subtasks = tuple(self._subtask(chain, edges) for chain in self._chains)
        return Chains(subtasks, tuple(self.channels), self._commits, tuple(self._dropped))

    def _ends(self, chain: Chain) -> list[ChannelEnd]:
        """Return the ends of a subtask's channels, edge by edge, and by source slot in each."""
        return [
            ChannelEnd(edge.input, keeps_order=_partitioner_class(edge, chain).keeps_order)
            for edge in chain.edges
            for _ in range(edge.channels(self._plan.parallelism))
        ]

    def _partitioners(self, chain: Chain) -> list[Partitioner]:
        """Return this slot's sending ends of every edge into `chain`."""
        partitioners: list[Partitioner] = []
        first = 0
        for edge in chain.edges:
            partitioners.append(
                self._partitioner(chain, edge, self._channels_of(chain, edge, first))
            )
            first += edge.channels(self._plan.parallelism)
        return partitioners

    def _channels_of(self, chain: Chain, edge: Edge, first: int) -> list[OutputChannel]:
        """Return this slot's channels of `edge`.

        `first` is the edge's first number at each gate.
        """
        me = self._context.slot
        gate = self.gates[chain.id]
        if edge.exchange is Exchange.FORWARD:
            self.channels.append(LocalChannel(gate, first))
            return self.channels[-1:]
        # Append one by one: if a channel cannot be opened, the earlier ones are known for closing.
        for target in range(self._plan.parallelism):
            self.channels.append(
                LocalChannel(gate, first + me)
                if target == me
                else FlightChannel(
                    self._client(target),
                    self._context.credentials,
                    chain=chain.id,
                    source=me,
                    target=SlotIdentity(self._plan.job, self._plan.attempt, target),
                    channel=first + me,
                    schema=edge.feed.schema,
                )
            )
        return self.channels[-self._plan.parallelism :]

    def _partitioner(
        self, chain: Chain, edge: Edge, channels: Sequence[OutputChannel]
    ) -> Partitioner:
        kind = _partitioner_class(edge, chain)
        if issubclass(kind, KeyGroupPartitioner):
            return kind(edge.key, self._plan.max_parallelism, channels, edge.feed.schema)
        return kind(channels, edge.feed.schema)

    def _replay(self, chain: Chain, gate: InputGate) -> None:
        """Make `gate` replay this subtask's rows that were in flight into `chain`, in order.

        With another parallelism the subtask gets parts of batches. They are joined into batches of
        the old size. Otherwise each rescaling would make batches smaller, and a replay slower.
        """
        reader = self._context.storage.reader()
        edges = {edge.input: edge for edge in chain.edges}
        for into, edge in sorted(edges.items()):
            # The edge's own partitioner divides the rows, so each row goes to the slot that now
            # owns its key.
            kept = [CollectedChannel() for _ in range(self._plan.parallelism)]
            partitioner, schema = self._partitioner(chain, edge, kept), edge.feed.schema
            rows_max = 0
            for part in self._deploy.in_flight:
                if (part.chain, part.input) != (chain.id, into):
                    continue
                for rows in decode_batches(reader.read(part.handle)):
                    if (rows.schema.names, rows.schema.types) != (schema.names, schema.types):
                        raise StateIncompatible(
                            f"checkpoint {self._deploy.restored_checkpoint} holds rows in flight"
                            f" into {chain.id!r} with columns {rows.schema}, but the chain now"
                            f" takes {schema}. Start the unchanged pipeline, stop it (which"
                            " leaves no rows in flight), and then change it"
                        )
                    rows_max = max(rows_max, rows.num_rows)
                    # Rebuild with this schema: different metadata would prevent batches from being
                    # joined.
                    partitioner.receive(Batch(pa.record_batch(rows.columns, schema=schema)))
            mine = join_batches(kept[self._context.slot].batches, rows_max)
            gate.replay(mine, into)
            if mine:
                reach("replayed")

    def _client(self, target: int) -> flight.FlightClient:
        if target not in self._clients:
            address = self._deploy.data_addresses[target]
            self._clients[target] = self._context.credentials.slot_client(address)
        return self._clients[target]

    def _subtask(self, chain: Chain, edges: Mapping[str, Sequence[Partitioner]]) -> Subtask:
        ref = SubtaskRef(chain.id, self._context.slot)
        running: dict[str, RunningOperator] = {}
        for operator in chain.operators:
            if self._context.closing.is_set():
                raise SlotLost("the slot shuts down while its state is restored")
            running[operator.uid] = built = self._build_operator(operator, ref)
            if isinstance(built, (KeyedOperator, function_operators.FunctionOperator)):
                self._dropped += built.dropped
            if operator is not chain.head:
                for feed in operator.feeds:
                    running[feed.uid].outlet(feed).append(built.receive)
        leaving: list[LeavingEdge] = []
        for below in self._chains:
            for edge, partitioner in zip(below.edges, edges[below.id], strict=True):
                if edge.above == chain.id:
                    leaving.append(LeavingEdge(below.id, edge.input, partitioner))
                    running[edge.feed.uid].outlet(edge.feed).append(partitioner.receive)
        operators = tuple(running.values())
        head = operators[0]
        if isinstance(head, SourceOperator):
            timeout_s = self._plan.settings.poll_timeout_s
            return SourceSubtask(ref, head, operators, leaving, self._context.post, timeout_s)
        mode = (
            AlignmentMode.ALIGNED
            if self._plan.delivery is Delivery.EXACTLY_ONCE
            else AlignmentMode.AT_LEAST_ONCE
        )
        gate = self.gates[chain.id]
        self._replay(chain, gate)
        timed = _find_timed_channels(chain, self._plan.parallelism)
        return ReceivingSubtask(ref, gate, operators, leaving, self._context.post, mode, timed)

    def _build_operator(self, operator: Operator, ref: SubtaskRef) -> RunningOperator:
        built = self._operator(operator, ref)
        if isinstance(built, KeyedOperator) and ref.index == 0:
            # Only subtask 0 describes the operator, which keeps checkpoints of many subtasks short.
            built.described = describe_operator(operator)
        return built

    def _operator(self, operator: Operator, ref: SubtaskRef) -> RunningOperator:
        uid = operator.uid
        match operator.work:
            case ReadFrom():
                return self._source(operator.work, uid)
            case (MapBatches() | MapInArrow() | MapInPandas() | JoinTable() | SelectSql()) as work:
                return _batch_mapper(uid, work, operator.schema)
            case (MapRecords() | FlatMapRecords() | FilterRecords()) as work:
                return _record_mapper(uid, work, operator.schema)
            case (
                ProcessKeyed() | ProcessConnected() | ProcessBroadcast() | ProcessRecords()
            ) as work:
                return self._function_operator(work, operator)
            case (
                ProcessBatches() | JoinConnected() | RunAggregates() | AggregateWindows()
            ) as work:
                return self._batch_operator(work, operator)
            case WriteTo() as work:
                return self._sink(operator, work, ref)

    def _source(self, work: ReadFrom, uid: str) -> SourceOperator:
        elements: Sequence[bytes] = self._find_restored(uid).lists.get(SPLITS, ())
        context = ReaderContext(
            job=self._plan.job,
            uid=uid,
            subtask=self._context.slot,
            parallelism=self._plan.parallelism,
            attempt=self._plan.attempt,
            by_split=work.watermarks is not None,
        )
        states = [decode_split(element) for element in elements]
        reader = work.source.reader([state.split for state in states], context)
        return SourceOperator(uid, reader, self._context.beside, work.watermarks, states)

    def _batch_operator(
        self,
        work: ProcessBatches | JoinConnected | RunAggregates | AggregateWindows,
        operator: Operator,
    ) -> KeyedOperator:
        uid, schema, input_schema = operator.uid, operator.schema, operator.input_schema
        store = self._store(uid)
        match work:
            case JoinConnected():
                states, event_time = self._operator_state(uid), self._event_time(uid)
                return JoinOperator(uid, work, store, states, schema, event_time=event_time)
            case ProcessBatches():
                states, event_time = self._operator_state(uid), self._event_time(uid)
                return function_operators.KeyedBatchProcessor(
                    uid, work, store, states, input_schema, schema, event_time
                )
            case RunAggregates():
                return AggregateRunner(uid, work, store, input_schema, schema)
            case AggregateWindows():
                event_times = self._find_restored(uid).lists.get(EVENT_TIME, ())
                groups = self._key_groups()
                if isinstance(work.windows, EventTimeSessionWindows):
                    return SessionAggregator(
                        uid, work, store, input_schema, schema, groups, event_times
                    )
                return WindowAggregator(uid, work, store, input_schema, schema, groups, event_times)

    def _event_time(self, uid: str) -> RestoredEventTime:
        elements = self._find_restored(uid).lists.get(EVENT_TIME, ())
        return RestoredEventTime(elements, self._key_groups(), self._plan.max_parallelism)

    def _key_groups(self) -> range:
        plan = self._plan
        return key_group_range(plan.max_parallelism, plan.parallelism, self._context.slot)

    def _store(self, uid: str) -> KeyedStateStore:
        plan = self._plan
        groups = self._key_groups()
        context = StateContext(
            uid=uid,
            subtask=self._context.slot,
            key_groups=groups,
            max_parallelism=plan.max_parallelism,
            scratch_dir=self._context.scratch.path,
            allow_non_restored_state=plan.allow_non_restored_state,
        )
        return self._backend.open(
            context, self._find_restored(uid).keyed, self._context.storage.reader()
        )

    def _function_operator(
        self,
        work: ProcessKeyed | ProcessConnected | ProcessBroadcast | ProcessRecords,
        operator: Operator,
    ) -> RunningOperator:
        uid, schema = operator.uid, operator.schema
        states = self._operator_state(uid)
        match work:
            case ProcessKeyed(compiled=CompiledFunction()):
                store = self._store(uid)
                return CompiledProcessor(uid, work, store, states, operator.input_schema, schema)
            case ProcessKeyed():
                event_time = self._event_time(uid)
                return function_operators.KeyedProcessor(
                    uid, work, self._store(uid), states, schema, event_time
                )
            case ProcessConnected():
                event_time, store = self._event_time(uid), self._store(uid)
                return connect_streams(uid, work, store, states, schema, event_time)
            case ProcessBroadcast() if work.key:
                event_time, store = self._event_time(uid), self._store(uid)
                return function_operators.KeyedBroadcastProcessor(
                    uid, work, store, states, schema, event_time
                )
            case ProcessBroadcast():
                return function_operators.BroadcastProcessor(uid, work, states, schema)
            case ProcessRecords():
                return function_operators.RecordProcessor(uid, work, states, schema)

    def _operator_state(self, uid: str) -> OperatorStateStore:
        return OperatorStateStore(
            uid,
            subtask=self._context.slot,
            parallelism=self._plan.parallelism,
            key_groups=self._key_groups(),
            max_parallelism=self._plan.max_parallelism,
            is_restored=self._deploy.operator(uid) is not None,
            handles=self._find_restored(uid).raw,
            reader=self._context.storage.reader(),
            allow_non_restored_state=self._plan.allow_non_restored_state,
        )

    def _sink(self, operator: Operator, work: WriteTo, ref: SubtaskRef) -> SinkOperator:
        context = WriterContext(
            job=self._plan.job,
            uid=operator.uid,
            sink_id=work.sink_id,
            subtask=ref.index,
            parallelism=self._plan.parallelism,
            attempt=self._plan.attempt,
            first_checkpoint=self._deploy.next_checkpoint,
            schema=operator.schema,
            staging=self._context.storage.staging(work.sink_id),
            on_bad_row=work.on_bad_row,
        )
        worker = self._commits.worker(ref, operator, work)
        writer = work.sink.writer(context)
        return SinkOperator(operator.uid, work, writer, worker, context)

    def _find_restored(self, uid: str) -> RestoredOperator:
        return self._deploy.operator(uid) or RestoredOperator(uid)


def _record_mapper(
    uid: str, work: MapRecords | FlatMapRecords | FilterRecords, schema: pa.Schema
) -> RunningOperator:
    if isinstance(work, FilterRecords):
        return RecordFilter(uid, work)
    return RecordMapper(uid, work, schema)


def _batch_mapper(
    uid: str, work: MapBatches | MapInArrow | MapInPandas | JoinTable | SelectSql, schema: pa.Schema
) -> RunningOperator:
    match work:
        case MapBatches():
            return BatchMapper(uid, work, schema)
        case MapInArrow(function):
            return BatchIteratorMapper(uid, ArrowFunction(uid, function, schema))
        case MapInPandas(function):
            return BatchIteratorMapper(uid, PandasFunction(uid, function, schema))
        case JoinTable():
            return LookupJoiner(uid, work, schema)
        case SelectSql():
            return SqlMapper(uid, work, schema)


def _partitioner_class(edge: Edge, chain: Chain) -> type[Partitioner]:
    match edge.exchange:
        case Exchange.FORWARD:
            return ForwardPartitioner
        case Exchange.BY_KEY:
            is_sink = isinstance(chain.head.work, WriteTo)
            return SinkPartitioner if is_sink else KeyGroupPartitioner
        case Exchange.BROADCAST:
            return BroadcastPartitioner


def _find_timed_channels(chain: Chain, parallelism: int) -> list[int]:
    """Return the input channels that carry event time. If no stream does, return all channels."""
    timed: list[bool] = []
    for edge in chain.edges:
        timed += [edge.has_event_time] * edge.channels(parallelism)
    return [channel for channel, has in enumerate(timed) if has] or list(range(len(timed)))
