"""The work of both engines, and its size: flink/src/main/java/onceflow/bench has the same.

Payments are those of `DatagenSource`: one a millisecond of event time on each stream.
"""

from __future__ import annotations

from dataclasses import dataclass

PARALLELISM = 2
ACCOUNTS = 100_000
WINDOW_MS = 400_000
JOIN_MS = 50_000
"""How far apart partners are at most: each payment has one on average."""
TIMERS = 1_000_000
KEYS = 1_000_000
CHANGED_PER_SECOND = 10_000


@dataclass(frozen=True, slots=True)
class Work:
    """One subject; `name` is that in both engines' programs, unless Flink's has another."""

    name: str
    title: str
    flinks_name: str = ""
    """That of Flink's own form of the same work, where ours has two."""
    prologue_rows: int = 0
    is_paced: bool = False
    """Its figures are those of its checkpoints, for its rows come at a pace."""
    is_whole: bool = False
    """It takes one checkpoint alone, its first, once its prologue has been read."""


WORKS = (
    Work("balance", "running balance"),
    Work("balance-ttl", "running balance with a time to live"),
    Work("windows", "windowed sums"),
    Work("function", "balance by a function a record"),
    Work("function-batches", "the same by a function of batches", flinks_name="function"),
    Work("function-compiled", "that of a record, compiled", flinks_name="function"),
    Work("timers", "that of a record, 1,000,000 timers pending", prologue_rows=TIMERS),
    Work("join", "interval join"),
    Work("million-keys", "1,000,000 keys of 100 bytes", prologue_rows=KEYS, is_paced=True),
    Work(
        "million-keys-whole",
        "1,000,000 keys: the first checkpoint",
        prologue_rows=KEYS,
        is_paced=True,
        is_whole=True,
    ),
)
