"""Broken variants of the product's own code. The simulator must catch each of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from onceflow.core.protocol.splits import Split, SplitState
from onceflow.core.protocol.watermarks import SplitWatermarks
from onceflow.core.runtime.dataflow.restored_event_time import RestoredEventTime
from onceflow.core.runtime.driver import restore, sink_recovery
from onceflow.core.runtime.slot import chain_builder, commits


@dataclass(frozen=True)
class Mutant:
    """One attribute of the product that is replaced."""

    name: str
    owner: Any
    attribute: str
    break_it: Callable[[Any], Any]
    """Returns the broken attribute; is given the right one."""
    caught_by: int = 0
    """The seed of a schedule that catches it."""
    changes: dict[str, Any] = field(default_factory=dict[str, Any])
    """What of the plan helps to catch it."""

    @contextmanager
    def applied(self) -> Generator[None]:
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
    def begin(self: Any, elements: Any, owned: range, max_parallelism: int | None = None) -> None:
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


_PROGRESS: Any = commits.__dict__["_Progress"]

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the fastest sink of a subtask counts",
        _PROGRESS,
        "record_commits",
        _fastest_sink,
        3,
    ),
    Mutant("a decision is a commit", _PROGRESS, "record_commits", _heard_early, 1),
    Mutant("splits lose their event time", SplitWatermarks, "with_event_times", _no_event_times),
    Mutant("event time starts anew", RestoredEventTime, "__init__", _starts_anew, 2),
    Mutant(
        "every slot reads the same splits", restore, "_divide_splits", _splits_of_first_alone, 1
    ),
    Mutant("recovery commits nothing", sink_recovery, "to_commits", _commits_nothing),
    Mutant("recovery rolls nothing back", sink_recovery, "to_aborts", _aborts_all, 3),
    Mutant("rows in flight are lost", chain_builder.ChainBuilder, "_replay", _replays_nothing, 9),
)
