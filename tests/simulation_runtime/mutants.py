"""Broken variants of the product's own code. The simulator must catch each of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from onceflow.core.plan.graph import Graph
from onceflow.core.protocol.checkpoints import in_flight
from onceflow.core.protocol.log.memory import NOTHING_REMEMBERED
from onceflow.core.protocol.loops.attempt import AttemptLoop
from onceflow.core.protocol.splits import Split, SplitState
from onceflow.core.protocol.watermarks import MAX_WATERMARK, SplitWatermarks
from onceflow.core.runtime.dataflow import (
    async_operator,
    channels,
    function_operators,
    partitioners,
    window_operators,
)
from onceflow.core.runtime.dataflow.restored_event_time import RestoredEventTime
from onceflow.core.runtime.dataflow.source_operator import encode_split
from onceflow.core.runtime.driver import (
    restore,
    savepoint_restore,
    sink_recovery,
    source_splits,
)
from onceflow.core.runtime.slot import chain_builder, commits
from onceflow.core.state.states import timers
from onceflow.core.storage.log import decision_log


@dataclass(frozen=True)
class Mutant:
    """One attribute of the product that is replaced."""

    name: str
    owner: Any
    attribute: str
    break_it: Callable[[Any], Any]
    """Returns the broken attribute; is given the right one."""

    @contextmanager
    def apply(self) -> Generator[None]:
        """Break the product meanwhile."""
        right = self.owner.__dict__[self.attribute]
        setattr(self.owner, self.attribute, self.break_it(right))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, right)


def _fastest_sink(_: Any) -> Any:
    return property(lambda self: max(self.by_sink.values(), default=self.decided))


def _no_event_times(_: Any) -> Any:
    def with_nothing(self: Any, splits: Sequence[Split]) -> tuple[SplitState, ...]:
        del self
        return tuple(map(SplitState, splits))

    return with_nothing


def _starts_anew(right: Any) -> Any:
    def begin(self: Any, elements: Any, owned: range, max_parallelism: int = 1) -> None:
        right(self, (), owned, max_parallelism)

    return begin


def _splits_of_first_alone(right: Any) -> Any:
    def divide(elements: Sequence[bytes], parallelism: int) -> Any:
        divided = right(elements, parallelism)
        return [divided[0]] * parallelism

    return divide


def _commits_nothing(right: Any) -> Any:
    def to_commits(commit: Any) -> Any:
        return right(commit)[:0]

    return to_commits


def _aborts_all(right: Any) -> Any:
    def to_aborts(abort: Any) -> Any:
        return right(abort)[:0]

    return to_aborts


def _replays_nothing(_: Any) -> Any:
    def replay(self: Any, chain: Any, gate: Any) -> None:
        del self, chain, gate

    return replay


def _heard_early(_: Any) -> Any:
    return property(lambda self: self.decided)


def _owners_of_16_bits(right: Any) -> Any:
    names: Any = partitioners
    # Other tasks run within `receive`, so the right function must be known before.
    kept = names.key_groups

    def receive(self: Any, batch: Any) -> Any:
        def narrow(hashes: Any, groups: int) -> _Narrow:
            return _Narrow(kept(hashes, groups))

        names.key_groups = narrow
        try:
            return right(self, batch)
        finally:
            names.key_groups = kept

    return receive


class _Narrow:
    """Key groups that stay numbers of 16 bits when they are multiplied."""

    def __init__(self, groups: Any) -> None:
        self._groups = groups

    def astype(self, _: Any) -> Any:
        return self._groups


def _latest_of_all(right: Any) -> Any:
    def begin(self: Any, elements: Any, owned: range, max_parallelism: int = 1) -> None:
        right(self, elements, owned, max_parallelism)
        self._watermarks[:] = self.most
        self.least = self.most

    return begin


def _end_of_time(_: Any) -> Any:
    def find(self: Any) -> int:
        del self
        return MAX_WATERMARK

    return find


def _own_committables_alone(right: Any) -> Any:
    def record(self: Any, checkpoint: Any, committables: Any) -> Any:
        right(self, checkpoint, committables)
        return tuple(committables)

    return record


def _forgets_times_when_it_grows(_: Any) -> Any:
    def encode_splits(states: Any) -> tuple[bytes, ...]:
        return tuple(encode_split(SplitState(state.split)) for state in states)

    return encode_splits


def _forgets_overtaken_ends(_: Any) -> Any:
    def overtaken_ends(self: Any) -> frozenset[int]:
        del self
        return frozenset()

    return property(overtaken_ends)


def _late_requests_are_lost(_: Any) -> Any:
    return property(lambda self: ())


def _skips_what_is_proven(right: Any) -> Any:
    def plan(listed: Any, in_doubt: Any, **others: Any) -> Any:
        plan = right(listed, in_doubt, **others)
        there = {one.transaction for one in in_doubt}
        return replace(plan, commit=tuple(c for c in plan.commit if c.transaction in there))

    return plan


def _takes_restored_alone(right: Any) -> Any:
    def plan(listed: Any, in_doubt: Any, **others: Any) -> Any:
        return right(listed, in_doubt, **{**others, "memory": NOTHING_REMEMBERED})

    return plan


def _nothing_in_flight(_: Any) -> Any:
    def list_rows(self: Any) -> Iterator[Any]:
        del self
        return iter(())

    return list_rows


def _barrier_before_rows(right: Any) -> Any:
    def push(self: Any, barrier: Any) -> Any:
        *rows, pushed = right(self, barrier)
        return (pushed, *rows)

    return push


def _no_call_is_outstanding(_: Any) -> Any:
    def find_outstanding(self: Any) -> None:
        del self

    return find_outstanding


def _forwards_at_once(_: Any) -> Any:
    def hold_watermark(self: Any, watermark: int) -> None:
        self._forward(watermark)

    return hold_watermark


def _restores_no_timers(right: Any) -> Any:
    def begin(self: Any, store: Any, domain: Any) -> None:
        right(self, store, domain)
        self.queue = timers.TimerQueue()

    return begin


def _fires_nothing_at_the_end(_: Any) -> Any:
    def flush(self: Any) -> None:
        del self

    return flush


def _no_last_rows(_: Any) -> Any:
    def makes_last_rows(self: Any) -> bool:
        del self
        return False

    return makes_last_rows


def _replays_into_the_first(right: Any) -> Any:
    def replay(self: Any, batches: Any, into: int) -> None:
        del into
        right(self, batches, 0)

    return replay


def _always_put_back(_: Any) -> Any:
    def is_put_back(*_: Any) -> bool:
        return True

    return is_put_back


def _remembers_all(_: Any) -> Any:
    def keep_view(savepoint: Any, view: Any, *_: Any, **__: Any) -> Any:
        del savepoint
        return view

    return keep_view


_PROGRESS: Any = commits.__dict__["_Progress"]

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the fastest sink of a subtask counts",
        _PROGRESS,
        "record_commits",
        _fastest_sink,
    ),
    Mutant("a decision is a commit", _PROGRESS, "record_commits", _heard_early),
    Mutant("splits lose their event time", SplitWatermarks, "with_event_times", _no_event_times),
    Mutant("event time starts anew", RestoredEventTime, "__init__", _starts_anew),
    Mutant("every slot reads the same splits", restore, "_divide_splits", _splits_of_first_alone),
    Mutant("recovery commits nothing", sink_recovery, "to_commits", _commits_nothing),
    Mutant("recovery rolls nothing back", sink_recovery, "to_aborts", _aborts_all),
    Mutant("rows in flight are lost", chain_builder.ChainBuilder, "_replay", _replays_nothing),
    Mutant(
        "an end of stream that a barrier overtakes is forgotten",
        in_flight.InputQueues,
        "overtaken_ends",
        _forgets_overtaken_ends,
    ),
    Mutant(
        "an ack lists its own checkpoint alone",
        commits.CommitWorker,
        "record_pre_commit",
        _own_committables_alone,
    ),
    Mutant("the latest key group counts for all", RestoredEventTime, "__init__", _latest_of_all),
    Mutant(
        "a drain brings windows to the end of time",
        window_operators.WindowAggregator,
        "_last_due",
        _end_of_time,
    ),
    Mutant(
        "owners are computed with 16 bits",
        partitioners.KeyGroupPartitioner,
        "receive",
        _owners_of_16_bits,
    ),
    Mutant(
        "known splits lose their event time when the source grows",
        source_splits,
        "_encode_splits",
        _forgets_times_when_it_grows,
    ),
    Mutant("requests end with the attempt", AttemptLoop, "unanswered", _late_requests_are_lost),
    Mutant(
        "recovery commits what is in doubt alone",
        sink_recovery,
        "plan_commits",
        _skips_what_is_proven,
    ),
    Mutant(
        "recovery knows the last decision alone",
        sink_recovery,
        "plan_commits",
        _takes_restored_alone,
    ),
    Mutant(
        "rows that wait for answers are in no snapshot",
        async_operator.AsyncOperator,
        "_rows_in_flight",
        _nothing_in_flight,
    ),
    Mutant(
        "barriers push no rows before them through",
        in_flight.OutputQueue,
        "push",
        _barrier_before_rows,
    ),
    Mutant(
        "the job ends before the last answers",
        async_operator.AsyncOperator,
        "outstanding",
        _no_call_is_outstanding,
    ),
    Mutant(
        "a watermark passes rows that wait for answers",
        async_operator.AsyncOperator,
        "hold_watermark",
        _forwards_at_once,
    ),
    Mutant("timers are not restored", timers.DomainTimers, "__init__", _restores_no_timers),
    Mutant(
        "timers in processing time are lost at the end",
        function_operators.KeyedFunctionOperator,
        "flush",
        _fires_nothing_at_the_end,
    ),
    Mutant("the job ends before its last rows", Graph, "makes_last_rows", _no_last_rows),
    Mutant(
        "rows in flight of both inputs go to the first",
        channels.InputGate,
        "replay",
        _replays_into_the_first,
    ),
    Mutant("a repeated start goes back again", savepoint_restore, "is_put_back", _always_put_back),
    Mutant(
        "a rewind remembers what was committed since",
        decision_log,
        "view_before",
        _remembers_all,
    ),
)

CAUGHT_BY: Mapping[str, int] = MappingProxyType(
    {
        "event time starts anew": 8,
        "recovery commits nothing": 18,
        "recovery rolls nothing back": 8,
        "rows in flight are lost": 489,
        "an end of stream that a barrier overtakes is forgotten": 6396,
        "an ack lists its own checkpoint alone": 34,
        "the latest key group counts for all": 65,
        "a drain brings windows to the end of time": 20,
        "owners are computed with 16 bits": 23,
        "known splits lose their event time when the source grows": 35,
        "requests end with the attempt": 68,
        "recovery commits what is in doubt alone": 28,
        "recovery knows the last decision alone": 327,
        "rows that wait for answers are in no snapshot": 70,
        "barriers push no rows before them through": 155,
        "the job ends before the last answers": 8,
        "a watermark passes rows that wait for answers": 703,
        "timers are not restored": 16,
        "timers in processing time are lost at the end": 2,
        "the job ends before its last rows": 21,
        "rows in flight of both inputs go to the first": 667,
        "a repeated start goes back again": 1965,
        "a rewind remembers what was committed since": 32,
    }
)
"""Seeds of schedules that catch what the first schedules do not. Tests try these first."""
