"""Builds the subtasks of one slot: operators with their state, gates, channels and edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import flight

from onceflow.core.crash_points import reach
from onceflow.core.errors import SlotLost, StateIncompatible
from onceflow.core.plan.graph import Chain, Edge, Exchange, Operator
from onceflow.core.plan.work import WriteTo
from onceflow.core.protocol.checkpoints.alignment import AlignmentMode
from onceflow.core.protocol.checkpoints.in_flight import ChannelEnd
from onceflow.core.protocol.ids import SubtaskRef
from onceflow.core.protocol.messages import Deploy
from onceflow.core.runtime.dataflow import function_operators
from onceflow.core.runtime.dataflow.async_operator import AsyncOperator
from onceflow.core.runtime.dataflow.channels import (
    Batch,
    CollectedChannel,
    InputGate,
    LocalChannel,
    OutputChannel,
    decode_batches,
    join_batches,
)
from onceflow.core.runtime.dataflow.keyed_operators import KeyedOperator
from onceflow.core.runtime.dataflow.operator_descriptions import describe_operator
from onceflow.core.runtime.dataflow.operators import (
    RunningOperator,
)
from onceflow.core.runtime.dataflow.partitioners import (
    BroadcastPartitioner,
    ForwardPartitioner,
    KeyGroupPartitioner,
    Partitioner,
    SinkPartitioner,
)
from onceflow.core.runtime.dataflow.source_operator import SourceOperator
from onceflow.core.runtime.dataflow.subtask import (
    LeavingEdge,
    ReceivingSubtask,
    SourceSubtask,
    Subtask,
)
from onceflow.core.runtime.slot.commits import SlotCommits
from onceflow.core.runtime.slot.context import SlotContext
from onceflow.core.runtime.slot.operator_builders import OperatorParts, build_operator
from onceflow.core.runtime.slot.program import Program
from onceflow.core.runtime.transport.data_plane import FlightChannel, SlotIdentity
from onceflow.core.settings.pipeline_settings import Delivery


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
            chain.id: InputGate(
                self._ends(chain),
                self._plan.settings.channel_batches,
                {edge.input: edge.feed.schema for edge in chain.edges},
            )
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
                self._partitioner(chain, edge, self._make_channels(chain, edge, first))
            )
            first += edge.channels(self._plan.parallelism)
        return partitioners

    def _make_channels(self, chain: Chain, edge: Edge, first: int) -> list[OutputChannel]:
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
        partitioner = kind(channels, edge.feed.schema)
        partitioner.pushes = chain.head.work.absorbs_rows
        return partitioner

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
                    if not rows.num_rows:
                        continue
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
            if isinstance(
                built, (KeyedOperator, function_operators.FunctionOperator, AsyncOperator)
            ):
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
        post, trace = self._context.post, self._context.trace
        return ReceivingSubtask(ref, gate, operators, leaving, post, mode, timed, trace)

    def _build_operator(self, operator: Operator, ref: SubtaskRef) -> RunningOperator:
        built = self._operator(operator, ref)
        if isinstance(built, KeyedOperator) and ref.index == 0:
            # Only subtask 0 describes the operator, which keeps checkpoints of many subtasks short.
            built.described = describe_operator(operator)
        return built

    def _operator(self, operator: Operator, ref: SubtaskRef) -> RunningOperator:
        context, deploy = self._context, self._deploy
        return build_operator(
            OperatorParts(operator, ref, context, self._backend, deploy, self._commits)
        )


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
