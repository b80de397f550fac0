"""What holds for every decision, and for the targets at the end of a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from tests.simulation_runtime.scheduler import Violation
from tests.simulation_runtime.source import Record, SplitRecords
from tests.simulation_runtime.targets import Target

from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.watermarks import NO_WATERMARK
from onceflow.core.runtime.dataflow.restored_event_time import EVENT_TIME
from onceflow.core.runtime.dataflow.source_operator import SPLITS, decode_split

WINDOW_MS = 1_000


class DecisionOracle:
    """Compares the event time of each decision with the records before its positions."""

    def __init__(self, splits: Mapping[str, SplitRecords], delay_ms: int) -> None:
        self._splits = splits
        self._delay_ms = delay_ms
        self._watermarks: dict[int, int] = {}
        """By key group."""

    def check(self, completed: CompletedCheckpoint) -> None:
        """Raise Violation unless `completed` says how far event time has come."""
        positions = self._check_splits(completed)
        limit = self._find_limit(positions)
        for _, operator in completed.operator("counted"):
            for element in operator.lists.get(EVENT_TIME, ()):
                first, last, watermark = msgspec.msgpack.decode(element)
                if limit is not None and watermark > limit:
                    raise Violation(
                        f"checkpoint {completed.checkpoint}: key groups {first} to {last} are at"
                        f" {watermark}, and the splits at {limit}"
                    )
                # The ends of the range are enough: a range of another subtask shares one of them.
                for group in {first, last}:
                    before = self._watermarks.get(group, NO_WATERMARK)
                    if watermark < before:
                        raise Violation(
                            f"checkpoint {completed.checkpoint}: key group {group} goes back from"
                            f" {before} to {watermark}"
                        )
                    self._watermarks[group] = watermark

    def _check_splits(self, completed: CompletedCheckpoint) -> dict[str, int]:
        positions: dict[str, int] = {}
        for _, operator in completed.operator("records"):
            for element in operator.lists.get(SPLITS, ()):
                state = decode_split(element)
                name, position = state.split.id, int(state.split.position)
                if name in positions:
                    raise Violation(f"checkpoint {completed.checkpoint} holds {name} twice")
                positions[name] = position
                latest = _find_latest(self._splits[name].records[:position])
                if state.event_time_ms != latest:
                    raise Violation(
                        f"checkpoint {completed.checkpoint}: the event time of {name} at {position}"
                        f" is {state.event_time_ms}, and its records say {latest}"
                    )
        return positions

    def _find_limit(self, positions: Mapping[str, int]) -> int | None:
        """Return the watermark that no operator can be past; None if all splits have ended."""
        limits: list[int] = []
        for name, position in positions.items():
            records = self._splits[name].records
            if position < len(records):
                latest = _find_latest(records[:position])
                limits.append(NO_WATERMARK if latest is None else latest - self._delay_ms - 1)
        return min(limits) if limits else None


def _find_latest(records: Sequence[Record]) -> int | None:
    return max((record.at for record in records if record.at is not None), default=None)


def check_targets(records: Collection[Record], targets: Mapping[str, Target]) -> None:
    """Raise Violation unless each record, and each window, is in each target once."""
    expected = Counter(map(to_row, records))
    for name in ("raw", "copy"):
        require_same(name, Counter(targets[name].rows), expected)
    _check_windows([record for record in records if record.at is not None], targets)
    for name, target in targets.items():
        if target.prepared:
            raise Violation(f"{name}: {sorted(target.prepared)} are left prepared")


def _check_windows(records: Collection[Record], targets: Mapping[str, Target]) -> None:
    """Require that each window has fired once, with its records that are not late."""
    late = Counter(targets["late"].rows)
    if wrong := late - Counter(to_row(record) for record in records if record.may_be_late):
        raise Violation(f"late: {sorted(wrong)} came in time")
    expected: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        if not late[to_row(record)]:
            assert record.at is not None
            start = record.at - record.at % WINDOW_MS
            expected.setdefault((record.key, start), []).append(record)
    windows = Counter(
        (key, start, len(some), sum(1 << record.id for record in some))
        for (key, start), some in expected.items()
    )
    rows = Counter(
        (key, round(start.timestamp() * 1_000), n, ids)
        for key, start, _, n, ids in targets["windows"].rows
    )
    require_same("windows", rows, windows)


def to_row(record: Record) -> tuple[int, int, int | None, int]:
    """Return `record` as sinks have it."""
    return record.id, record.key, record.at, 1 << record.id


def require_same(name: str, rows: Counter[Any], expected: Counter[Any]) -> None:
    """Raise Violation unless `rows` are `expected`."""
    if rows != expected:
        lost, more = expected - rows, rows - expected
        raise Violation(f"{name}: lost {sorted(map(str, lost))}, too many {sorted(map(str, more))}")
