"""Builds the running operator of each kind of work: one line of a table for each kind.

A builder gets the work and the parts of its operator: state, restored event time, settings. A test
holds that the table has every kind of work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa

from onceflow.core.plan import work as kinds
from onceflow.core.plan.graph import Operator
from onceflow.core.plan.windows import EventTimeSessionWindows
from onceflow.core.protocol.ids import SubtaskRef
from onceflow.core.protocol.messages import Deploy, RestoredOperator
from onceflow.core.protocol.splits import key_group_range
from onceflow.core.runtime.dataflow import function_operators, operators
from onceflow.core.runtime.dataflow.all_windows import PreAggregator, RowGatherer, WindowMerger
from onceflow.core.runtime.dataflow.async_operator import AsyncOperator
from onceflow.core.runtime.dataflow.batch_iterators import ArrowFunction, PandasFunction
from onceflow.core.runtime.dataflow.cached_lookups import CachedLookupJoiner
from onceflow.core.runtime.dataflow.compiled_operator import CompiledProcessor
from onceflow.core.runtime.dataflow.count_windows import CountAggregator
from onceflow.core.runtime.dataflow.deduplication import Deduplicator
from onceflow.core.runtime.dataflow.early_windows import EarlyWindowAggregator
from onceflow.core.runtime.dataflow.join_operators import JoinOperator
from onceflow.core.runtime.dataflow.keyed_operators import AggregateRunner
from onceflow.core.runtime.dataflow.last_rows import LastRowsAggregator
from onceflow.core.runtime.dataflow.lookup_join import LookupJoiner
from onceflow.core.runtime.dataflow.reader_failures import ReaderFailures
from onceflow.core.runtime.dataflow.restored_event_time import EVENT_TIME, RestoredEventTime
from onceflow.core.runtime.dataflow.session_operators import SessionAggregator
from onceflow.core.runtime.dataflow.sink_operator import SinkOperator, SinkRefusals
from onceflow.core.runtime.dataflow.source_operator import (
    SPLITS,
    SourceOperator,
    decode_split,
    to_positions,
)
from onceflow.core.runtime.dataflow.top_rows import TopKeeper
from onceflow.core.runtime.dataflow.window_joins import connect_streams
from onceflow.core.runtime.dataflow.window_operators import WindowAggregator
from onceflow.core.runtime.slot.commits import SlotCommits
from onceflow.core.runtime.slot.context import SlotContext
from onceflow.core.spi import ReaderContext, WriterContext
from onceflow.core.state import KeyedStateStore, StateBackend, StateContext
from onceflow.core.state.states.operator_state import OperatorStateStore

_WorkT = TypeVar("_WorkT", bound=kinds.Work)


class OperatorParts:
    """The parts of one operator in one subtask. Each is opened when the builder asks for it."""

    def __init__(
        self,
        operator: Operator,
        ref: SubtaskRef,
        context: SlotContext,
        backend: StateBackend,
        deploy: Deploy,
        commits: SlotCommits,
    ) -> None:
        self.operator = operator
        self.ref = ref
        self.context = context
        self.plan = context.plan
        self.deploy = deploy
        self.commits = commits
        self._backend = backend

    @property
    def uid(self) -> str:
        """The uid of the operator."""
        return self.operator.uid

    @property
    def schema(self) -> pa.Schema:
        """The schema of the operator's output."""
        return self.operator.schema

    @property
    def input_schema(self) -> pa.Schema:
        """The schema of the operator's first input."""
        return self.operator.input_schema

    @property
    def restored(self) -> RestoredOperator:
        """The operator's state of the restored checkpoint, or an empty state if it has none."""
        return self.deploy.operator(self.uid) or RestoredOperator(self.uid)

    @property
    def key_groups(self) -> range:
        """The key groups of this subtask."""
        return key_group_range(self.plan.max_parallelism, self.plan.parallelism, self.context.slot)

    @property
    def event_times(self) -> Sequence[bytes]:
        """The encoded event times of the restored key groups."""
        return self.restored.lists.get(EVENT_TIME, ())

    def event_time(self) -> RestoredEventTime:
        """Return the event time that restored key groups had reached."""
        return RestoredEventTime(self.event_times, self.key_groups, self.plan.max_parallelism)

    def open_store(self) -> KeyedStateStore:
        """Open the store of the operator's keyed state, with the restored state. Call it once."""
        context = StateContext(
            uid=self.uid,
            subtask=self.context.slot,
            key_groups=self.key_groups,
            max_parallelism=self.plan.max_parallelism,
            scratch_dir=self.context.scratch.path,
            allow_non_restored_state=self.plan.allow_non_restored_state,
        )
        return self._backend.open(context, self.restored.keyed, self.context.storage.reader())

    def open_operator_state(self) -> OperatorStateStore:
        """Open the store of the operator's state without a key, with the restored state."""
        return OperatorStateStore(
            self.uid,
            subtask=self.context.slot,
            parallelism=self.plan.parallelism,
            key_groups=self.key_groups,
            max_parallelism=self.plan.max_parallelism,
            is_restored=self.deploy.operator(self.uid) is not None,
            handles=self.restored.raw,
            reader=self.context.storage.reader(),
            allow_non_restored_state=self.plan.allow_non_restored_state,
        )


def _build_source(work: kinds.ReadFrom, parts: OperatorParts) -> SourceOperator:
    context = ReaderContext(
        job=parts.plan.job,
        uid=parts.uid,
        subtask=parts.context.slot,
        parallelism=parts.plan.parallelism,
        attempt=parts.plan.attempt,
        by_split=bool(work.watermarks),
    )
    states = [decode_split(element) for element in parts.restored.lists.get(SPLITS, ())]
    source_class = type(work.source).__name__
    with ReaderFailures(parts.uid, source_class, context.attempt, ()).during("reader"):
        reader = work.source.reader([state.split for state in states], context)
    parts.context.trace.record(
        "restored_positions",
        source=parts.uid,
        positions=to_positions(state.split for state in states),
    )
    return SourceOperator(
        parts.uid,
        reader,
        parts.context.beside,
        work.watermarks,
        states,
        work.source.outputs,
        context.attempt,
        parts.context.trace,
    )


def _build_lookup_join(work: kinds.JoinLookup, parts: OperatorParts) -> CachedLookupJoiner:
    name = f"onceflow {parts.plan.job}/{parts.plan.attempt}/{parts.context.slot} {parts.uid}"
    return CachedLookupJoiner(parts.uid, work, parts.schema, name)


def _build_map_in_arrow(
    work: kinds.MapInArrow, parts: OperatorParts
) -> operators.BatchIteratorMapper:
    function = ArrowFunction(parts.uid, work.function, parts.schema)
    return operators.BatchIteratorMapper(parts.uid, function)


def _build_map_in_pandas(
    work: kinds.MapInPandas, parts: OperatorParts
) -> operators.BatchIteratorMapper:
    function = PandasFunction(parts.uid, work.function, parts.schema)
    return operators.BatchIteratorMapper(parts.uid, function)


def _build_map_async(work: kinds.MapAsync, parts: OperatorParts) -> AsyncOperator:
    states = parts.open_operator_state()
    return AsyncOperator(parts.uid, work, states, parts.input_schema, parts.schema, parts.plan.job)


def _build_process_keyed(
    work: kinds.ProcessKeyed, parts: OperatorParts
) -> operators.RunningOperator:
    states, store = parts.open_operator_state(), parts.open_store()
    if work.compiled is not None:
        return CompiledProcessor(parts.uid, work, store, states, parts.input_schema, parts.schema)
    return function_operators.KeyedProcessor(
        parts.uid, work, store, states, parts.schema, parts.event_time()
    )


def _build_process_connected(
    work: kinds.ProcessConnected, parts: OperatorParts
) -> operators.RunningOperator:
    states, store = parts.open_operator_state(), parts.open_store()
    return connect_streams(parts.uid, work, store, states, parts.schema, parts.event_time())


def _build_join(work: kinds.JoinConnected, parts: OperatorParts) -> JoinOperator:
    store, states = parts.open_store(), parts.open_operator_state()
    return JoinOperator(parts.uid, work, store, states, parts.schema, event_time=parts.event_time())


def _build_process_broadcast(
    work: kinds.ProcessBroadcast, parts: OperatorParts
) -> operators.RunningOperator:
    states = parts.open_operator_state()
    if not work.key:
        return function_operators.BroadcastProcessor(parts.uid, work, states, parts.schema)
    return function_operators.KeyedBroadcastProcessor(
        parts.uid, work, parts.open_store(), states, parts.schema, parts.event_time()
    )


def _build_process_records(
    work: kinds.ProcessRecords, parts: OperatorParts
) -> function_operators.RecordProcessor:
    states = parts.open_operator_state()
    return function_operators.RecordProcessor(parts.uid, work, states, parts.schema)


def _build_process_batches(
    work: kinds.ProcessBatches, parts: OperatorParts
) -> function_operators.KeyedBatchProcessor:
    store, states = parts.open_store(), parts.open_operator_state()
    return function_operators.KeyedBatchProcessor(
        parts.uid, work, store, states, parts.input_schema, parts.schema, parts.event_time()
    )


def _build_aggregate_windows(
    work: kinds.AggregateWindows, parts: OperatorParts
) -> SessionAggregator | WindowAggregator:
    aggregator: type[SessionAggregator | WindowAggregator] = WindowAggregator
    if isinstance(work.windows, EventTimeSessionWindows):
        aggregator = SessionAggregator
    elif work.early is not None:
        aggregator = EarlyWindowAggregator
    return aggregator(
        parts.uid,
        work,
        parts.open_store(),
        parts.input_schema,
        parts.schema,
        parts.key_groups,
        parts.event_times,
    )


def _build_merge_windows(work: kinds.MergeWindows, parts: OperatorParts) -> WindowMerger:
    return WindowMerger(
        parts.uid,
        work,
        parts.open_store(),
        parts.schema,
        parts.key_groups,
        parts.event_times,
    )


def _build_sink(work: kinds.WriteTo, parts: OperatorParts) -> SinkOperator:
    context = WriterContext(
        job=parts.plan.job,
        uid=parts.uid,
        sink_id=work.sink_id,
        subtask=parts.ref.index,
        parallelism=parts.plan.parallelism,
        attempt=parts.plan.attempt,
        first_checkpoint=parts.deploy.next_checkpoint,
        schema=parts.schema,
        staging=parts.context.storage.staging(work.sink_id),
        on_bad_row=work.on_bad_row,
    )
    worker = parts.commits.worker(parts.ref, parts.operator, work)
    with SinkRefusals(parts.uid, context.attempt).name_refusal("its writer was not opened"):
        writer = work.sink.writer(context)
    return SinkOperator(parts.uid, work, writer, worker, context)


_Build: TypeAlias = Callable[[Any, OperatorParts], operators.RunningOperator]


def _line(
    kind: type[_WorkT], build: Callable[[_WorkT, OperatorParts], operators.RunningOperator]
) -> tuple[type[kinds.Work], _Build]:
    """Return a line of the table: a kind of work and its builder."""
    return kind, build


BUILDERS: Mapping[type[kinds.Work], _Build] = MappingProxyType(
    dict(
        [
            _line(kinds.ReadFrom, _build_source),
            _line(kinds.MapBatches, lambda w, p: operators.BatchMapper(p.uid, w, p.schema)),
            _line(kinds.MapInArrow, _build_map_in_arrow),
            _line(kinds.MapInPandas, _build_map_in_pandas),
            _line(kinds.JoinTable, lambda w, p: LookupJoiner(p.uid, w, p.schema)),
            _line(kinds.JoinLookup, _build_lookup_join),
            _line(kinds.SelectSql, lambda w, p: operators.SqlMapper(p.uid, w, p.schema)),
            _line(kinds.MapRecords, lambda w, p: operators.RecordMapper(p.uid, w, p.schema)),
            _line(kinds.FlatMapRecords, lambda w, p: operators.RecordMapper(p.uid, w, p.schema)),
            _line(kinds.MapAsync, _build_map_async),
            _line(kinds.FilterRecords, lambda w, p: operators.RecordFilter(p.uid, w)),
            _line(kinds.ProcessKeyed, _build_process_keyed),
            _line(kinds.ProcessConnected, _build_process_connected),
            _line(kinds.JoinConnected, _build_join),
            _line(kinds.ProcessBroadcast, _build_process_broadcast),
            _line(kinds.ProcessRecords, _build_process_records),
            _line(kinds.ProcessBatches, _build_process_batches),
            _line(
                kinds.RunAggregates,
                lambda w, p: AggregateRunner(p.uid, w, p.open_store(), p.input_schema, p.schema),
            ),
            _line(
                kinds.Deduplicate,
                lambda w, p: Deduplicator(p.uid, w, p.open_store(), p.input_schema),
            ),
            _line(
                kinds.KeepTop,
                lambda w, p: TopKeeper(p.uid, w, p.open_store(), p.input_schema, p.schema),
            ),
            _line(
                kinds.AggregateLastRows,
                lambda w, p: LastRowsAggregator(p.uid, w, p.open_store(), p.input_schema, p.schema),
            ),
            _line(kinds.AggregateWindows, _build_aggregate_windows),
            _line(kinds.GatherRows, lambda w, p: RowGatherer(p.uid)),
            _line(
                kinds.PreAggregateWindows,
                lambda w, p: PreAggregator(p.uid, w, p.input_schema, p.schema),
            ),
            _line(kinds.MergeWindows, _build_merge_windows),
            _line(
                kinds.AggregateCounts,
                lambda w, p: CountAggregator(p.uid, w, p.open_store(), p.input_schema, p.schema),
            ),
            _line(kinds.WriteTo, _build_sink),
        ]
    )
)
"""The builder of each kind of work."""


def build_operator(parts: OperatorParts) -> operators.RunningOperator:
    """Return the running operator of `parts`, with its restored state."""
    work = parts.operator.work
    return BUILDERS[type(work)](work, parts)
