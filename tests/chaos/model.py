"""The rows that each sink must hold, computed from the records of the topics alone.

A plain model in plain Python: it shares no code with the engine. Each row is a tuple in the order
of the columns, and a sink must hold exactly these rows, each as often as here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tests.chaos.schedule import TopicGraph
from typing_extensions import assert_never

Row: TypeAlias = tuple[object, ...]
_WINDOW_MS = 500
_WITHIN_MS = 200


@dataclass(frozen=True, slots=True)
class Record:
    """A record of a topic."""

    id: int
    account: str
    amount: int
    ts: int


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the table, in the order in which they were made."""

    operation: str
    """`r` for a row that was there before the job, `c`, `u` or `d`."""
    record: Record
    """The row after the change, or before it if it was deleted."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The content of one sink."""

    columns: tuple[str, ...]
    rows: Counter[Row]


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between a sink's content and the model."""

    expected: int
    found: int
    missing: int
    """Rows that the sink lacks."""
    doubled: int
    """Rows that the sink holds more often than the model."""
    unexpected: int
    """Rows that the model does not have at all."""
    examples: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """True if the sink holds what it must hold."""
        return not (self.missing or self.doubled or self.unexpected)


def expect(graph: TopicGraph, topics: Sequence[Sequence[Record]]) -> tuple[Expected, Expected]:
    """Return the content of the first and of the second sink.

    The records of an account are in one partition of their topic, in the order of `topics`.
    """
    first, second = topics[0], topics[-1]
    match graph:
        case "running":
            return _run_totals(first), _aggregate_windows(first)
        case "union":
            both = [*first, *second]
            plain = Counter[Row]((r.id, r.account, r.amount, r.ts) for r in both)
            return _aggregate_windows(both), Expected(("id", "account", "amount", "ts"), plain)
        case "join":
            return _join(first, second, is_outer=False), _run_totals(first)
        case "left-join":
            return _join(first, second, is_outer=True), _aggregate_windows(second)
        case _:
            assert_never(graph)


def expect_copy(changes: Sequence[Change]) -> tuple[Expected, Expected]:
    """Return the content of the first sink, a copy of the table, and of the second, each change."""
    table: dict[int, Record] = {}
    each = Counter[Row]()
    for change in changes:
        row = change.record
        each[change.operation, row.id, row.account, row.amount, row.ts] += 1
        if change.operation == "d":
            del table[row.id]
        else:
            table[row.id] = row
    copy = Counter[Row]((row.id, row.account, row.amount, row.ts) for row in table.values())
    columns = ("id", "account", "amount", "ts")
    return Expected(columns, copy), Expected(("_op", *columns), each)


def compare(expected: Expected, found: Counter[Row]) -> Difference:
    """Return the difference between the model and the rows of a sink."""
    missing = expected.rows - found
    extra = found - expected.rows
    doubled = sum(count for row, count in extra.items() if row in expected.rows)
    examples = [f"missing {row}" for row in list(missing)[:3]]
    examples += [f"too often {row}" for row in list(extra)[:3]]
    return Difference(
        expected=expected.rows.total(),
        found=found.total(),
        missing=missing.total(),
        doubled=doubled,
        unexpected=extra.total() - doubled,
        examples=tuple(examples),
    )


def _run_totals(records: Sequence[Record]) -> Expected:
    totals: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    rows = Counter[Row]()
    for record in records:
        balance, n = totals[record.account]
        totals[record.account] = balance, n = balance + record.amount, n + 1
        rows[record.id, record.account, record.amount, record.ts, balance, n] += 1
    return Expected(("id", "account", "amount", "ts", "balance", "n"), rows)


def _aggregate_windows(records: Sequence[Record]) -> Expected:
    totals: dict[tuple[str, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for record in records:
        window = record.account, record.ts - record.ts % _WINDOW_MS
        total, n = totals[window]
        totals[window] = total + record.amount, n + 1
    rows = Counter[Row]((*window, *total) for window, total in totals.items())
    return Expected(("account", "begin", "total", "n"), rows)


def _join(left: Sequence[Record], right: Sequence[Record], *, is_outer: bool) -> Expected:
    partners: dict[str, list[Record]] = defaultdict(list)
    for record in right:
        partners[record.account].append(record)
    rows = Counter[Row]()
    for record in left:
        near = [
            partner
            for partner in partners[record.account]
            if abs(partner.ts - record.ts) <= _WITHIN_MS
        ]
        for partner in near:
            rows[record.account, record.id, partner.id, partner.amount] += 1
        if is_outer and not near:
            rows[record.account, record.id, None, None] += 1
    return Expected(("account", "id", "other", "paid"), rows)
