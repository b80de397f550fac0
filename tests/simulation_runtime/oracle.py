"""The checks of every decision, and of the targets at the end of a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import msgspec
import numpy as np
from tests.simulation_runtime.plan import BEGIN_S, DELAY_MS, WINDOW_MS, Plan
from tests.simulation_runtime.scheduler import Violation
from tests.simulation_runtime.source import Record
from tests.simulation_runtime.targets import Target

from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.watermarks import NO_WATERMARK
from onceflow.core.runtime.dataflow.restored_event_time import EVENT_TIME
from onceflow.core.runtime.dataflow.source_operator import SPLITS, decode_split
from onceflow.core.state.keys.key_groups import key_group_of


class Oracle:
    """Knows what the job has to do, from the plan alone."""

    def __init__(self, plan: Plan, targets: Mapping[str, Target]) -> None:
        self._plan = plan
        self._targets = targets
        self._watermarks = np.full(plan.max_parallelism, NO_WATERMARK, np.int64)
        """The event time of the last decision, by key group."""
        self._drained = self._watermarks.copy()
        """The event time of the last drain, by key group."""
        self.is_draining = False
        """True from the time when a drain is asked for, until the next attempt."""

    def check_decision(self, completed: CompletedCheckpoint) -> None:
        """Raise Violation unless `completed` says how far event time has come."""
        limit = self._find_limit(self._check_splits(completed))
        if self.is_draining:
            limit = self._find_last_due()
        elif limit is not None:
            limit = max(limit, int(self._drained.max()))
        for first, last, watermark in _list_event_times(completed):
            groups = f"checkpoint {completed.checkpoint}: key groups {first} to {last}"
            if limit is not None and watermark > limit:
                raise Violation(f"{groups} are at {watermark}, and the splits at {limit}")
            before = self._watermarks[first : last + 1]
            if (latest := int(before.max())) > watermark:
                raise Violation(f"{groups} go back from {latest} to {watermark}")
            before[:] = watermark
            if self.is_draining:
                self._drained[first : last + 1] = watermark

    def forget_event_time(self) -> None:
        """Let event time go back, because the job begins from an older savepoint."""
        self._watermarks[:] = NO_WATERMARK

    def has_all_rows(self) -> bool:
        """Return whether the job has read each record, and nothing but a drain can bring more."""
        rows = {name: len(self._targets[name].rows) for name in ("raw", "copy", "late")}
        if rows["raw"] < len(self._plan.records):
            return False
        # Functions may keep rows until the drain.
        return self._plan.way == "last rows" or rows["copy"] >= self._expect_copies().total()

    def check_targets(self) -> None:
        """Raise Violation unless each record, and each window, is in each target once."""
        expected = Counter(map(_to_row, self._plan.records))
        _require_same("raw", Counter(self._targets["raw"].rows), expected)
        _require_same("copy", Counter(self._targets["copy"].rows), self._expect_copies())
        self._check_windows([record for record in self._plan.records if record.at is not None])
        for name, target in self._targets.items():
            if target.prepared:
                raise Violation(f"{name}: {sorted(target.prepared)} are left prepared")

    def _expect_copies(self) -> Counter[tuple[int | None, ...]]:
        """Return the rows of the target `copy`."""
        records = self._plan.records
        if self._plan.way == "join":
            pairs = product(records, records)
            return Counter(
                (even.id, odd.id)
                for even, odd in pairs
                if even.key == odd.key and even.id % 2 == 0 and odd.id % 2 == 1
            )
        rows: Counter[tuple[int | None, ...]] = Counter(map(_to_row, records))
        if self._plan.calls is not None and self._plan.calls.place == "copy and late":
            rows.update(self._targets["late"].rows)
        return rows

    def _check_splits(self, completed: CompletedCheckpoint) -> dict[str, int]:
        positions: dict[str, int] = {}
        for _, operator in completed.operator("records"):
            for element in operator.lists.get(SPLITS, ()):
                state = decode_split(element)
                name, position = state.split.id, int(state.split.position)
                if name in positions:
                    raise Violation(f"checkpoint {completed.checkpoint} holds {name} twice")
                positions[name] = position
                latest = _find_latest(self._plan.splits[name].records[:position])
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
            split = self._plan.splits[name]
            # A split that appears later holds back what is then not yet told.
            has_ended = self._plan.discovery_s is None and position == len(split.records)
            if not has_ended and split.appears_s == BEGIN_S:
                latest = _find_latest(split.records[:position])
                limits.append(NO_WATERMARK if latest is None else latest - DELAY_MS - 1)
        return min(limits) if limits else None

    def _find_last_due(self) -> int:
        """Return the time at which the last window of all is due."""
        latest = max(
            (record.at for record in self._plan.records if record.at is not None), default=0
        )
        return latest - latest % WINDOW_MS + WINDOW_MS - 1

    def _check_windows(self, records: Iterable[Record]) -> None:
        """Require that each window has fired once, with its records that are not late."""
        late = Counter(self._targets["late"].rows)
        expected: dict[tuple[int, int], list[Record]] = {}
        for record in records:
            assert record.at is not None
            start = record.at - record.at % WINDOW_MS
            if not late[_to_row(record)]:
                expected.setdefault((record.key, start), []).append(record)
            elif not (record.may_be_late or self._has_drained(record.key, start + WINDOW_MS)):
                raise Violation(f"{record} came in time and is late")
        if len(late) < late.total():
            raise Violation(f"some are late twice: {late}")
        windows = Counter(
            (key, start, len(some), sum(1 << record.id for record in some))
            for (key, start), some in expected.items()
        )
        rows = Counter(
            (key, round(start.timestamp() * 1_000), n, ids)
            for key, start, _, n, ids in self._targets["windows"].rows
        )
        _require_same("windows", rows, windows)

    def _has_drained(self, key: int, end: int) -> bool:
        return end - 1 <= int(self._drained[key_group_of(key, self._plan.max_parallelism)])


def _list_event_times(completed: CompletedCheckpoint) -> list[tuple[int, int, int]]:
    return [
        msgspec.msgpack.decode(element, type=tuple[int, int, int])
        for _, operator in completed.operator("counted")
        for element in operator.lists.get(EVENT_TIME, ())
    ]


def _find_latest(records: Sequence[Record]) -> int | None:
    return max((record.at for record in records if record.at is not None), default=None)


def _to_row(record: Record) -> tuple[int, int, int | None, int]:
    return record.id, record.key, record.at, 1 << record.id


def _require_same(name: str, rows: Counter[Any], expected: Counter[Any]) -> None:
    if rows != expected:
        lost, more = expected - rows, rows - expected
        raise Violation(f"{name}: lost {sorted(map(str, lost))}, too many {sorted(map(str, more))}")
