"""The counters of a sink, and the rules to join them over its subtasks and over attempts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeVar

_JOIN = "join"
_LASTS = "lasts"


def _join_by(join: Callable[[Any, Any], Any], *, lasts: bool = False) -> Mapping[str, Any]:
    """Return the metadata of a counter: `join` joins two values, `lasts` keeps it for restarts."""
    return {_JOIN: join, _LASTS: lasts}


def _take_first(value: Any, further: Any) -> Any:
    return value or further


_TOTAL: Final = _join_by(operator.add, lasts=True)
_SUM_NOW: Final = _join_by(operator.add)
_LONGEST: Final = _join_by(max)
_FIRST: Final = _join_by(_take_first)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkCounts:
    """Transactions and rows of a sink, or of one of its subtasks."""

    open: int = field(default=0, metadata=_SUM_NOW)
    """The number of subtasks that have written rows since their last barrier."""
    prepared: int = field(default=0, metadata=_SUM_NOW)
    """The number of transactions in doubt now: pre-committed, and not known to be committed."""
    committed: int = field(default=0, metadata=_TOTAL)
    retried: int = field(default=0, metadata=_TOTAL)
    """The number of commit tries that did not succeed and were repeated."""
    rows_committed: int = field(default=0, metadata=_TOTAL)
    rows_rejected: int = field(default=0, metadata=_TOTAL)
    """The number of bad rows that the writers left out."""
    oldest_prepared_s: float = field(default=0.0, metadata=_LONGEST)
    """The age of the transaction that has been in doubt longest; 0 if none is."""
    last_commit_ms: float = field(default=0.0, metadata=_LONGEST)
    """The duration of the slowest subtask's last commit, from the decision's arrival to the
    target's answer."""
    commit_refusal: str = field(default="", metadata=_FIRST)
    """The reason why a decided transaction or checkpoint is not committed yet, and the advice for
    people.

    Empty if the target has refused none.
    """
    commit_stuck: bool = field(default=False, metadata=_FIRST)
    """True if the target refuses that commit again and again until a person helps."""


_COUNTERS: Final = fields(SinkCounts)
CountsT = TypeVar("CountsT", bound=SinkCounts)


def add_counts(total: CountsT, further: SinkCounts) -> CountsT:
    """Return `total` with the counts of `further` added."""
    joined = {
        counter.name: counter.metadata[_JOIN](
            getattr(total, counter.name), getattr(further, counter.name)
        )
        for counter in _COUNTERS
    }
    return replace(total, **joined)


def keep_totals(counts: CountsT) -> CountsT:
    """Return `counts` for the start of the next attempt: totals are kept, others are reset."""
    reset: dict[str, Any] = {
        counter.name: counter.default for counter in _COUNTERS if not counter.metadata[_LASTS]
    }
    return replace(counts, **reset)
