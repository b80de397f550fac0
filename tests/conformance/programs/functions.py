"""Functions of random programs, which keep what the model can say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
from tests.conformance.programs.version import STATES, Version

from onceflow import (
    CoGroupBatch,
    CoGroupBatchFunction,
    CoGroupFunction,
    KeyedFunction,
    MapStateDescriptor,
    ProcessWindowFunction,
    Record,
    StateAccess,
    StateTtlConfig,
    Timer,
    TimeWindow,
    ValueStateDescriptor,
)
from onceflow.core.spi.lookups import LookupReader, LookupSource

CLOCK_BEGIN_MS = 1_700_000_000_000
CLOCK_END_MS = CLOCK_BEGIN_MS + 100_000
RECENT_MS = 150
"""How long a state lives that expires while a program runs."""


def clock_time_of(number: int) -> int:
    """Return the time at which the timer by the clock of record `number` is due."""
    return CLOCK_BEGIN_MS + number * 7


def event_time_of(at: int) -> int:
    """Return the time at which the timer in event time of a record is due."""
    return at + 35


BY_RECORD = (
    "id", "n", "amounts", "part", "fired", "profile", "steps", "tally", "seen", "recent", "now",
)  # fmt: skip


class ByRecord(KeyedFunction):
    """States of all kinds of a record's key, timers, and one dict that is changed in between."""

    def __init__(self, version: Version) -> None:
        self._key = version.key
        self._states = STATES[version.states]

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        columns = [(name, pa.int64()) for name in BY_RECORD]
        return pa.schema([input_schema.field(self._key), *columns, input_schema.field("extra")])

    def open(self, state: StateAccess) -> None:
        states = self._states
        ttl = StateTtlConfig("1 h") if states.lives_long else None
        self._n = state.value_state(ValueStateDescriptor[int]("n", int, default=0, ttl=ttl))
        self._amounts = state.map_state(MapStateDescriptor[Decimal, int]("amounts", Decimal, int))
        self._profile = state.value_state(ValueStateDescriptor[Any]("profile", states.profile))
        self._tallies = state.map_state(MapStateDescriptor[int, Any]("tally", int, states.tally))
        recent_ttl = StateTtlConfig(f"{RECENT_MS} ms")
        self._recent = state.value_state(ValueStateDescriptor[int]("recent", int, ttl=recent_ttl))
        if states.has_seen:
            self._seen = state.value_state(ValueStateDescriptor[int]("seen", int, default=0))
        self._timers = state.timers()

    def process(self, record: Record) -> Iterator[Record]:
        self._n.set(self._n.get() + 1)
        amount = Decimal(f"{record['v'] % 3}{('', '.0', '.00')[record['id'] % 3]}")
        self._amounts.put(amount, (self._amounts.get(amount) or 0) + 1)
        self._timers.register_event_time_timer(event_time_of(record["at"]))
        self._timers.register_processing_time_timer(clock_time_of(record["id"]))
        self._recent.set((self._recent.get() or 0) + 1)
        row = dict.fromkeys(BY_RECORD) | {
            self._key: record[self._key], "id": record["id"], "n": self._n.get(),
            "amounts": 100 * (self._amounts.get(amount) or 0) + len(list(self._amounts.keys())),
            "recent": self._recent.get(), "now": self._timers.current_processing_time(),
            "extra": record["extra"],
        } | self._evolved(record)  # fmt: skip
        for part in range(2):
            row["part"] = part
            yield row

    def _evolved(self, record: Record) -> Record:
        """Return what states hold whose types change from version to version."""
        states = self._states
        profile = self._profile.get() or states.profile()
        profile.count += 1
        if states.has_steps:
            profile.steps += 10
        self._profile.set(profile)
        tally = self._tallies.get(record["v"] % 3) or states.tally()
        if hasattr(tally, "amount"):
            tally.amount += 1
        else:
            tally.total += 1
        self._tallies.put(record["v"] % 3, tally)
        if states.has_seen:
            self._seen.set(self._seen.get() + 1)
        return {
            "profile": int(profile.count),
            "steps": profile.steps if states.has_steps else None,
            "tally": tally.amount if hasattr(tally, "amount") else tally.total,
            "seen": self._seen.get() if states.has_seen else None,
        }

    def on_timer(self, timer: Timer) -> Record:
        domain = 0 if timer.domain == "event" else 1
        fired = {self._key: timer.key, "part": domain, "fired": timer.at_ms, "extra": None}
        return dict.fromkeys(BY_RECORD) | fired


@dataclass(frozen=True)
class Returned:
    """Returns a value that its column cannot hold, for one record."""

    record: int
    value: Any

    def __call__(self, record: Record) -> Record:
        return {"id": record["id"], "made": self.value if record["id"] == self.record else None}


def _list_schema(input_schema: pa.Schema, version: Version) -> pa.Schema:
    columns: list[Any] = [
        input_schema.field(version.key), ("start", pa.int64()), ("end", pa.int64()),
        ("ids", pa.list_(pa.int64())), ("extras", pa.list_(input_schema.field("extra").type)),
    ]  # fmt: skip
    if version.added:
        columns.append(("added", pa.list_(pa.int64())))
    return pa.schema(columns)


def _lists(version: Version, key: Any, window: TimeWindow, records: list[Record]) -> Record:
    held = sorted(records, key=lambda record: record["id"])
    row = {
        version.key: key, "start": window.start_ms, "end": window.end_ms,
        "ids": [one["id"] for one in held], "extras": [one["extra"] for one in held],
    }  # fmt: skip
    return row | {"added": [one["added"] for one in held]} if version.added else row


class Lists(ProcessWindowFunction):
    """A function that returns the records of each window."""

    def __init__(self, version: Version) -> None:
        self._version = version

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return _list_schema(input_schema, self._version)

    def process(self, key: Any, window: TimeWindow, records: list[Record]) -> Record:
        return _lists(self._version, key, window, records)


class Ids(CoGroupFunction):
    """A function that returns the ids of each window's records, of both streams."""

    def __init__(self, version: Version) -> None:
        self._version = version

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return _list_schema(left, self._version)

    def process(
        self, key: Any, window: TimeWindow, left: list[Record], right: list[Record]
    ) -> Record:
        return _lists(self._version, key, window, [*left, *right])


class BatchIds(CoGroupBatchFunction):
    """The same of many windows at once."""

    def __init__(self, version: Version) -> None:
        self._version = version

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return _list_schema(left, self._version)

    def process(self, windows: CoGroupBatch) -> pa.RecordBatch:
        records: list[list[Record]] = [[] for _ in range(windows.window_count)]
        for side in (windows.left, windows.right):
            for window, record in zip(side.windows.tolist(), side.rows.to_pylist(), strict=True):
                records[int(window)].append(record)
        keys = windows.keys.column(self._version.key).to_pylist()
        bounds = zip(windows.starts_ms.tolist(), windows.ends_ms.tolist(), strict=True)
        rows = [
            _lists(self._version, key, TimeWindow(*times), held)
            for key, times, held in zip(keys, bounds, records, strict=True)
        ]
        schema = _list_schema(windows.left.rows.schema, self._version)
        return pa.RecordBatch.from_pylist(rows, schema)


class EqualNumbers(LookupSource):
    """A table that changes, in which `v` is the key `w`. It has each number once."""

    def describe(self, on: Sequence[str]) -> pa.Schema:
        return pa.schema([("w", pa.int64()), ("v", pa.int64())])

    def open(self, on: Sequence[str], name: str) -> LookupReader:
        return _ReadsEqualNumbers()


class _ReadsEqualNumbers(LookupReader):
    def read(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        numbers = keys.column("w")
        return pa.record_batch([numbers, numbers], ["w", "v"])

    def close(self) -> None: ...
