"""Fixes that are undone, each with the seed of a random program that finds it."""

# What is undone is inside the product.
# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import pyarrow as pa
from tests.conformance.programs import attempt

from onceflow.core.errors import StateCorrupt, UserFunctionError
from onceflow.core.plan.graph import Graph
from onceflow.core.plan.window_functions import KeptRecords
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.watermarks import NO_WATERMARK, SplitWatermarks, WatermarkMerge
from onceflow.core.runtime.dataflow import result_rows, user_functions
from onceflow.core.runtime.dataflow.async_operator import AsyncOperator
from onceflow.core.runtime.dataflow.operators import RunningOperator
from onceflow.core.runtime.dataflow.restored_event_time import EVENT_TIME
from onceflow.core.runtime.dataflow.result_rows import ResultRows
from onceflow.core.runtime.dataflow.window_operators import WindowAggregator
from onceflow.core.runtime.driver import restore
from onceflow.core.runtime.driver.restore import RestoredSlot, assign_state
from onceflow.core.state.aggregates import accumulators
from onceflow.core.state.aggregates.accumulator_shape import AccumulatorShape
from onceflow.core.state.keys import key_codec
from onceflow.core.state.keys.key_codec import encode_key
from onceflow.core.state.keys.key_index import to_key_array
from onceflow.core.state.snapshots.state_meta import StateMeta
from onceflow.core.state.states.ttl import TimedSerializer

Undo = Callable[[], AbstractContextManager[Any]]


def _same(key: Any) -> Any:
    return key


def _never(value: object) -> bool:
    return False


def _always(*values: object) -> bool:
    return True


def emit_after_a_stop_savepoint() -> AbstractContextManager[Any]:
    """Let timers and windows fire between a stop savepoint and the stop."""
    return patch.object(CheckpointKind, "ends_emission", property(_never))


def forget_event_time() -> AbstractContextManager[Any]:
    """Begin every attempt without event time."""

    def cut(graph: Graph, restored: CompletedCheckpoint, parallelism: int) -> list[RestoredSlot]:
        slots = assign_state(graph, restored, parallelism)
        return [
            replace(
                slot,
                operators=tuple(
                    replace(
                        operator, lists={k: v for k, v in operator.lists.items() if k != EVENT_TIME}
                    )
                    for operator in slot.operators
                ),
            )
            for slot in slots
        ]

    return patch.object(attempt, "assign_state", cut)


def take_a_reader_for_one_split() -> AbstractContextManager[Any]:
    """Let the rows of one split tell the event time of all splits of their reader."""
    of_one = SplitWatermarks.on_rows

    def of_all(
        self: SplitWatermarks, split_id: str, latest_ms: int, now_s: float, output: None
    ) -> None:
        for _, one in list(self._seen_at_s):
            of_one(self, one, latest_ms, now_s, output)

    return patch.object(SplitWatermarks, "on_rows", of_all)


def cut_results_off() -> AbstractContextManager[Any]:
    """Make columns of results as Arrow does."""

    def cut(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
        try:
            return pa.array(values, kind)
        except pa.ArrowException:
            return pa.array(values).cast(kind, safe=False)

    return patch.object(result_rows, "exact_array", cut)


def take_other_settings() -> AbstractContextManager[Any]:
    """Begin with another type of key, or other windows."""

    def take(graph: Graph, restored: CompletedCheckpoint) -> None:
        return None

    return patch.object(restore, "check_settings", take)


def keep_keys_in_their_zone() -> AbstractContextManager[Any]:
    """Make functions use keys whose zone repeats an hour."""
    return patch.object(user_functions, "has_own_python_keys", _never)


@contextmanager
def keep_decimals_as_written() -> Generator[None]:
    """Store a map's decimals with the zeros behind their last digit."""
    with (
        patch.object(key_codec, "to_stored_map_key", _same),
        patch.object(key_codec, "encode_stored_map_key", encode_key),
    ):
        yield


def keep_instants_in_nanoseconds() -> AbstractContextManager[Any]:
    """Keep the instants of keys in 64 bits of nanoseconds."""
    units = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}

    def cut(column: Any, kind: pa.DataType) -> pa.Array:
        array = to_key_array(column, kind)
        if not pa.types.is_timestamp(kind):
            return array
        wrapped = array.view(pa.int64()).to_numpy() * units[kind.unit] // units[kind.unit]
        return pa.array(wrapped).view(kind)

    return patch.object(accumulators, "to_key_array", cut)


def take_results_at_the_end() -> AbstractContextManager[Any]:
    """Take what a generator yields when it has ended."""
    take = ResultRows.take

    def at_the_end(self: ResultRows, result: Any) -> None:
        if isinstance(result, dict) or result is None:
            take(self, cast("Any", result))
        else:
            take(self, list(result))

    return patch.object(ResultRows, "take", at_the_end)


def lose_rows_in_flight() -> AbstractContextManager[Any]:
    """Begin every attempt without the rows that barriers overtook."""

    def cut(graph: Graph, restored: CompletedCheckpoint, parallelism: int) -> list[RestoredSlot]:
        slots = assign_state(graph, restored, parallelism)
        return [replace(slot, in_flight=()) for slot in slots]

    return patch.object(attempt, "assign_state", cut)


def wait_for_the_slowest_idle_input() -> AbstractContextManager[Any]:
    """Leave event time where it is when all inputs become idle."""
    advance = WatermarkMerge.next

    def stay(self: WatermarkMerge) -> int | None:
        left = self._watermarks.keys() - self._idle - self._ended
        if left or not self._idle:
            return advance(self)
        with patch.object(self, "_watermarks", dict.fromkeys(self._watermarks, NO_WATERMARK)):
            return advance(self)

    return patch.object(WatermarkMerge, "next", stay)


def end_event_time_with_one_input() -> AbstractContextManager[Any]:
    """Take the end of an input for the end of all when the others are idle."""
    advance = WatermarkMerge.next

    def end(self: WatermarkMerge) -> int | None:
        if self._told_end and self._watermarks.keys() == self._idle | self._ended:
            self._told_end |= self._idle
        return advance(self)

    return patch.object(WatermarkMerge, "next", end)


def forget_idle_splits() -> AbstractContextManager[Any]:
    """Wait for a split without records for ever."""

    def never(self: SplitWatermarks, now_s: float) -> int | None:
        return self._merge.next()

    return patch.object(SplitWatermarks, "next", never)


def carry_aggregates_by_order() -> AbstractContextManager[Any]:
    """Restore aggregates in the order in which they were, whatever their names."""

    def as_they_were(self: AccumulatorShape, found: StateMeta, values: pa.Array) -> pa.Array:
        return values

    return patch.object(AccumulatorShape, "convert_totals", as_they_were)


def keep_what_has_expired() -> AbstractContextManager[Any]:
    """Hand values out behind their time to live."""
    return patch.object(TimedSerializer, "is_visible", _always)


def forget_new_columns() -> AbstractContextManager[Any]:
    """Leave out of kept records the columns that are newer than they are."""
    open_records = cast("Any", KeptRecords).open

    def open_alone(self: KeptRecords[Any], state: Any) -> None:
        open_records(self, state)
        self._nulls = [{} for _ in self._nulls]

    return patch.object(KeptRecords, "open", open_alone)


def never_wake_for_the_clock() -> AbstractContextManager[Any]:
    """Let windows by the clock wait for the next record, also at the end of the input."""
    return patch.multiple(WindowAggregator, due_in_s=None, flush=RunningOperator.flush)


def lose_records_of_calls() -> AbstractContextManager[Any]:
    """Leave the records whose calls have not ended out of checkpoints."""

    def lose(_: AsyncOperator) -> Iterator[pa.RecordBatch]:
        return iter(())

    return patch.object(AsyncOperator, "_rows_in_flight", lose)


@dataclass(frozen=True)
class Mutant:
    """A fix that is undone, and a program that finds it."""

    undo: Undo
    seed: int
    backend: str = "heap"
    raises: type[Exception] = AssertionError


MUTANTS = (
    Mutant(emit_after_a_stop_savepoint, 91),
    Mutant(forget_event_time, 8),
    Mutant(take_a_reader_for_one_split, 3),
    Mutant(cut_results_off, 20),
    Mutant(take_other_settings, 1),
    Mutant(keep_keys_in_their_zone, 66),
    Mutant(keep_decimals_as_written, 67, "rocksdb"),
    Mutant(keep_instants_in_nanoseconds, 29),
    Mutant(take_results_at_the_end, 14),
    Mutant(lose_rows_in_flight, 135),
    Mutant(wait_for_the_slowest_idle_input, 13),
    Mutant(end_event_time_with_one_input, 36),
    Mutant(forget_idle_splits, 13),
    Mutant(carry_aggregates_by_order, 21, raises=StateCorrupt),
    Mutant(keep_what_has_expired, 14),
    Mutant(forget_new_columns, 9, raises=UserFunctionError),
    Mutant(never_wake_for_the_clock, 23),
    Mutant(lose_records_of_calls, 5),
)
