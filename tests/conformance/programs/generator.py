"""Random programs: a pipeline, its input, what it is put through, and what must come out."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, cast

import pyarrow as pa
from tests.conformance.programs.attempt import Row, new_pipeline
from tests.conformance.programs.source import WrittenSource
from tests.support.directory_sink import DirectorySink

from onceflow import (
    CoGroupFunction,
    EventTimeSessionWindows,
    KeyedFunction,
    MapStateDescriptor,
    Pipeline,
    ProcessWindowFunction,
    Record,
    SlidingEventTimeWindows,
    StateAccess,
    Stream,
    Timer,
    TimeWindow,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
    count,
    min_,
    sum_,
)

REPEATED = datetime(2024, 11, 3, 5, 30, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
UTC = timezone.utc
KEYS: tuple[tuple[pa.DataType, Sequence[Any]], ...] = (
    (pa.string(), ["", "a", "a\0", "é", "x" * 130]),
    (pa.large_string(), ["", "b"]),
    (pa.binary(), [b"", b"\0", b"\xff" * 9]),
    (pa.binary(2), [b"\0\0", b"\xff\xff"]),
    (pa.int8(), [-128, 0, 127]),
    (pa.int64(), [-(2**63), -1, 0, 2**63 - 1]),
    (pa.uint64(), [0, 2**63, 2**64 - 1]),
    (pa.bool_(), [True, False]),
    (pa.date32(), [date.min, date(1969, 12, 31), date.max]),
    (pa.date64(), [date.min, date(1970, 1, 1), date.max]),
    (pa.decimal128(10, 2), list(map(Decimal, ("0.00", "-0.10", "1.00", "99999999.99")))),
    (pa.decimal128(38, 0), [Decimal(0), Decimal(10**38 - 1)]),
    (pa.dictionary(pa.int32(), pa.string()), ["", "a", "b"]),
)
INSTANTS: tuple[tuple[pa.DataType, Sequence[Any]], ...] = (
    (pa.timestamp("us"), [datetime.min, datetime(1600, 1, 1), datetime(2300, 1, 1), datetime.max]),
    (pa.timestamp("s"), [datetime.min, datetime(1970, 1, 1), datetime(9999, 12, 31, 23, 59, 59)]),
    (pa.timestamp("ms", "UTC"), [REPEATED, datetime(9999, 12, 31, tzinfo=UTC)]),
    (
        pa.timestamp("us", "America/New_York"),
        [REPEATED, REPEATED + HOUR, datetime(9999, 12, 30, tzinfo=UTC)],
    ),
)  # fmt: skip
EXTRAS: tuple[tuple[pa.DataType, Sequence[Any]], ...] = (
    (pa.string(), ["", "\0", "é" * 100, None]),
    (pa.binary(), [b"", b"\0", None]),
    (pa.int64(), [-(2**63), 2**63 - 1, None]),
    (pa.uint64(), [0, 2**64 - 1]),
    (pa.float64(), [-0.0, 1e308, float("inf"), float("nan"), 5e-324, None]),
    (pa.bool_(), [True, False, None]),
    (pa.date32(), [date.min, date.max, None]),
    (pa.date64(), [date.min, date.max]),
    (pa.decimal128(38, 18), [Decimal("0.1"), Decimal("-99999999999999999999.999999999999999999")]),
    (pa.timestamp("us"), [datetime.min, datetime.max, None]),
    (pa.timestamp("us", "America/New_York"), [REPEATED, REPEATED + HOUR]),
    (
        pa.duration("us"),
        [timedelta(days=-(10**8)), timedelta(0), timedelta(microseconds=-1), None],
    ),
    (pa.time64("us"), [time.min, time.max, None]),
    (pa.time32("s"), [time.min, time(23, 59, 59)]),
    (pa.list_(pa.int64()), [[], [None, 2**63 - 1], None]),
    (pa.struct([("a", pa.string())]), [{"a": ""}, {"a": None}]),
)
KINDS = (
    "running", "process", "tumbling", "sliding", "session", "tumbling lists", "sliding lists",
    "session lists", "interval", "regular", "co_group", "result",
)  # fmt: skip
INEXACT: tuple[tuple[pa.DataType, Any], ...] = (
    (pa.int64(), 99.99),
    (pa.int64(), -0.7),
    (pa.int64(), Decimal("1.5")),
    (pa.int8(), 128),
    (pa.list_(pa.int64()), [1.9]),
    (pa.float32(), 1e300),
    (pa.timestamp("ms"), datetime(2024, 1, 1, microsecond=1)),
    (pa.timestamp("us"), datetime(2024, 1, 1, tzinfo=timezone(HOUR))),
    (pa.date32(), datetime(2024, 1, 1, 12)),
    (pa.decimal128(5, 2), Decimal("0.001")),
)
"""Columns, and values that they do not hold exactly."""
ACTIONS = ("checkpoint", "kill", "stop", "savepoint", "stop with savepoint")
DELAY_MS = 20


def plain(value: Any) -> Any:
    """Return a value so that two are equal if they are the same, whatever zone tells them."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    if isinstance(value, (list, tuple)):
        return tuple(plain(one) for one in cast("Sequence[Any]", value))
    if isinstance(value, (float, dict)):
        return repr(cast("object", value))
    return value


@dataclass(frozen=True)
class Program:
    """All that a seed stands for."""

    seed: int
    kind: str
    key: tuple[pa.DataType, tuple[Any, ...]]
    extra: tuple[pa.DataType, tuple[Any, ...]]
    sides: tuple[tuple[tuple[tuple[Row, ...], ...], ...], ...]
    """By source, split and batch."""
    size_ms: int
    slide_ms: int
    lateness_ms: int
    how: Any
    actions: tuple[str, ...]
    sources: list[WrittenSource] = field(
        default_factory=list[WrittenSource], init=False, compare=False
    )

    @property
    def schema(self) -> pa.Schema:
        """The columns of every source."""
        return pa.schema(
            [
                ("key", self.key[0]), ("at", pa.int64()), ("v", pa.int64()), ("id", pa.int64()),
                ("extra", self.extra[0]),
            ]
        )  # fmt: skip

    def records(self, side: int = 0) -> Iterator[Row]:
        """Yield the records of a source."""
        for split in self.sides[side]:
            for batch in split:
                yield from batch

    def pipeline(self) -> Pipeline:
        """Return the pipeline, with new sources."""
        pipeline = new_pipeline()
        self.sources.clear()
        for side in self.sides:
            parts = tuple(tuple(_batch(rows, self.schema) for rows in split) for split in side)
            self.sources.append(WrittenSource(parts, self.schema))
        streams = [
            pipeline.read(
                source, uid=f"records-{n}", watermarks=WatermarkStrategy("at", DELAY_MS / 1000)
            )
            for n, source in enumerate(self.sources)
        ]
        self._made(streams).write(DirectorySink("/nowhere"), uid="out")
        return pipeline

    def _made(self, streams: Sequence[Stream]) -> Stream:
        keyed = [stream.key_by("key") for stream in streams]
        first = keyed[0]
        match self.kind:
            case "running":
                return first.running(n=count(), total=sum_("v"), uid="work")
            case "result":
                kind, value = INEXACT[self.seed % len(INEXACT)]
                last = max((one["id"] for one in self.records()), default=0)
                schema = pa.schema([("id", pa.int64()), ("made", kind)])
                return streams[0].map(Returned(last, value), schema=schema)
            case "process":
                return first.process(ByRecord(), uid="work")
            case "interval":
                joined = first.interval_join(keyed[1], how=self.how)
                return joined.between(-0.05, 0.03).merge(uid="work")
            case "regular":
                return first.join(keyed[1], how=self.how, ttl="1 h").merge(uid="work")
            case "co_group":
                windows = first.connect(keyed[1]).window(self.windows())
                return windows.co_group(Ids(), uid="work")
            case _:
                windowed = first.window(self.windows(), allowed_lateness=self.lateness_ms / 1000)
                if self.kind.endswith("lists"):
                    return windowed.process(Lists(), uid="work")
                return windowed.aggregate(n=count(), total=sum_("v"), low=min_("v"), uid="work")

    def changed(self) -> Program | None:
        """Return a program that would misread this one's state, if there is such a one."""
        if self.kind in ("running", "result", "interval", "regular"):
            return None
        if self.kind == "process" or self.seed % 2:
            kind, values = KEYS[0] if pa.types.is_integer(self.key[0]) else KEYS[5]
            return replace(self, key=(kind, tuple(values)), sides=((),) * len(self.sides))
        return replace(self, size_ms=self.size_ms + 10, sides=((),) * len(self.sides))

    def windows(self) -> Any:
        """Return the windows."""
        if self.kind.startswith("sliding"):
            return SlidingEventTimeWindows(self.size_ms / 1000, self.slide_ms / 1000)
        if self.kind.startswith("session"):
            return EventTimeSessionWindows(self.size_ms / 1000)
        return TumblingEventTimeWindows(self.size_ms / 1000)


def _batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array([row[one.name] for row in rows], one.type) for one in schema]
    return pa.record_batch(arrays, schema=schema)


def program_of(seed: int) -> Program:
    """Return the program of a seed."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    in_windows = kind not in ("result", "running", "process", "interval", "regular")
    keys = rng.choice(KEYS if in_windows or rng.random() < 0.5 else INSTANTS)
    extra = rng.choice(EXTRAS)
    sides = 2 if kind in ("interval", "regular", "co_group") else 1
    ordered = kind in ("running", "process")
    late = in_windows and kind != "co_group" and "session" not in kind and rng.random() < 0.7
    splits = 1 if ordered or late else rng.randint(1, 3)
    lateness_ms = rng.choice([0, 60, 200]) if late else 0
    written = tuple(
        tuple(
            _split(rng, keys[1], extra[1], side * 1000 + split * 100, late=late)
            for split in range(splits)
        )
        for side in range(sides)
    )
    size_ms = rng.choice([40, 100, 130])
    return Program(
        seed, kind, (keys[0], tuple(keys[1])), (extra[0], tuple(extra[1])), written, size_ms,
        rng.choice([size_ms, size_ms // 2, 30]), lateness_ms,
        rng.choice(["inner", "left", "right", "full"]),
        tuple(rng.choices(ACTIONS, k=rng.randint(1, 5))),
    )  # fmt: skip


def _split(
    rng: random.Random, keys: Sequence[Any], extras: Sequence[Any], first: int, *, late: bool
) -> tuple[tuple[Row, ...], ...]:
    at, number = rng.randint(-100, 100), first
    batches: list[tuple[Row, ...]] = []
    for _ in range(rng.randint(0, 8)):
        rows: list[Row] = []
        for _ in range(rng.randint(1, 5)):
            at += rng.choice([0, 1, 5, 17, 60])
            back = rng.choice([0, 0, 3, DELAY_MS]) if not late else rng.choice([0, 0, 20, 60, 150])
            rows.append(
                {
                    "key": rng.choice(keys), "at": at - back, "v": rng.randint(-5, 5),
                    "id": number, "extra": rng.choice(extras),
                }
            )  # fmt: skip
            number += 1
        batches.append(tuple(rows))
    return tuple(batches)


# --- functions -----------------------------------------------------------------------------------

CLOCK_BEGIN_MS = 1_700_000_000_000
CLOCK_END_MS = CLOCK_BEGIN_MS + 100_000


def clock_time_of(number: int) -> int:
    """Return the time at which the timer by the clock of record `number` is due."""
    return CLOCK_BEGIN_MS + number * 7


def event_time_of(at: int) -> int:
    """Return the time at which the timer in event time of a record is due."""
    return at + 35


class ByRecord(KeyedFunction):
    """States of all kinds of a record's key, timers, and one dict that is changed in between."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        names = ("id", "n", "amounts", "part", "fired")
        columns = [(name, pa.int64()) for name in names]
        return pa.schema([input_schema.field("key"), *columns, input_schema.field("extra")])

    def open(self, state: StateAccess) -> None:
        self._n = state.value_state(ValueStateDescriptor[int]("n", int, default=0))
        self._amounts = state.map_state(MapStateDescriptor[Decimal, int]("amounts", Decimal, int))
        self._timers = state.timers()

    def process(self, record: Record) -> Iterator[Record]:
        self._n.set(self._n.get() + 1)
        amount = Decimal(f"{record['v'] % 3}{('', '.0', '.00')[record['id'] % 3]}")
        self._amounts.put(amount, (self._amounts.get(amount) or 0) + 1)
        self._timers.register_event_time_timer(event_time_of(record["at"]))
        self._timers.register_processing_time_timer(clock_time_of(record["id"]))
        row = {
            "key": record["key"], "id": record["id"], "n": self._n.get(),
            "amounts": 100 * (self._amounts.get(amount) or 0) + len(list(self._amounts.keys())),
            "fired": None, "extra": record["extra"],
        }  # fmt: skip
        for part in range(2):
            row["part"] = part
            yield row

    def on_timer(self, timer: Timer) -> Record:
        domain = 0 if timer.domain == "event" else 1
        return {
            "key": timer.key, "id": None, "n": None, "amounts": None, "part": domain,
            "fired": timer.at_ms, "extra": None,
        }  # fmt: skip


@dataclass(frozen=True)
class Returned:
    """Returns a value that its column cannot hold, for one record."""

    record: int
    value: Any

    def __call__(self, record: Record) -> Record:
        return {"id": record["id"], "made": self.value if record["id"] == self.record else None}


def _lists(input_schema: pa.Schema) -> list[Any]:
    return [
        input_schema.field("key"), ("start", pa.int64()), ("end", pa.int64()),
        ("ids", pa.list_(pa.int64())), ("extras", pa.list_(input_schema.field("extra").type)),
    ]  # fmt: skip


class Lists(ProcessWindowFunction):
    """What each window holds."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return pa.schema(_lists(input_schema))

    def process(self, key: Any, window: TimeWindow, records: list[Record]) -> Record:
        held = sorted(records, key=lambda record: record["id"])
        return {
            "key": key, "start": window.start_ms, "end": window.end_ms,
            "ids": [one["id"] for one in held], "extras": [one["extra"] for one in held],
        }  # fmt: skip


class Ids(CoGroupFunction):
    """What each window holds of both streams."""

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return pa.schema(_lists(left))

    def process(
        self, key: Any, window: TimeWindow, left: list[Record], right: list[Record]
    ) -> Record:
        held = sorted([*left, *right], key=lambda record: record["id"])
        return {
            "key": key, "start": window.start_ms, "end": window.end_ms,
            "ids": [one["id"] for one in held], "extras": [one["extra"] for one in held],
        }  # fmt: skip


# --- what must come out --------------------------------------------------------------------------


def check(program: Program, rows: Sequence[Row]) -> None:
    """Raise AssertionError unless `rows` are what the program must have written."""
    ways: dict[str, Callable[[Program, Sequence[Row]], None]] = {
        "running": _check_running, "process": _check_process, "interval": _check_pairs,
        "regular": _check_pairs, "result": _check_result,
    }  # fmt: skip
    ways.get(program.kind, _check_windows)(program, rows)


def _equal(found: Counter[Any], expected: Counter[Any]) -> None:
    missing, more = expected - found, found - expected
    if missing or more:
        raise AssertionError(
            f"missing {list(missing.elements())[:3]} ({sum(missing.values())}),"
            f" not expected {list(more.elements())[:3]} ({sum(more.values())})"
        )


def _check_result(program: Program, rows: Sequence[Row]) -> None:
    """Raise AssertionError unless there was nothing to refuse: a run that refuses it ends."""
    kind, value = INEXACT[program.seed % len(INEXACT)]
    assert not list(program.records()), f"{value!r} was written as {kind}: {list(rows)[:3]}"


def _check_running(program: Program, rows: Sequence[Row]) -> None:
    expected: Counter[Any] = Counter()
    totals: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for one in program.records():
        held = totals[plain(one["key"])]
        held[0] += 1
        held[1] += one["v"]
        expected[(plain(one["key"]), one["id"], *held, plain(one["extra"]))] += 1
    names = ("key", "id", "n", "total", "extra")
    _equal(Counter(tuple(plain(row[name]) for name in names) for row in rows), expected)


def _check_process(program: Program, rows: Sequence[Row]) -> None:
    expected: Counter[Any] = Counter()
    seen: dict[Any, list[int]] = defaultdict(list)
    timers: set[tuple[Any, int]] = set()
    for one in program.records():
        key = plain(one["key"])
        seen[key].append(one["v"] % 3)
        values = (key, one["id"], len(seen[key]),
                  100 * seen[key].count(one["v"] % 3) + len(set(seen[key])))  # fmt: skip
        for part in range(2):
            expected[(*values, part, None, plain(one["extra"]))] += 1
        timers.add((key, event_time_of(one["at"])))
        expected[key, None, None, None, 1, clock_time_of(one["id"]), None] += 1
    for key, at in timers:
        expected[key, None, None, None, 0, at, None] += 1
    names = ("key", "id", "n", "amounts", "part", "fired", "extra")
    _equal(Counter(tuple(plain(row[name]) for name in names) for row in rows), expected)


def _check_pairs(program: Program, rows: Sequence[Row]) -> None:
    expected: Counter[Any] = Counter()
    sides = [list(program.records(side)) for side in (0, 1)]
    paired: set[int] = set()

    def add(key: Any, left: Row | None, right: Row | None) -> None:
        expected[(plain(key), *_half(left), *_half(right))] += 1

    for left in sides[0]:
        for right in sides[1]:
            near = program.kind == "regular" or -50 <= right["at"] - left["at"] <= 30
            if near and plain(left["key"]) == plain(right["key"]):
                add(left["key"], left, right)
                paired |= {left["id"], right["id"]}
    for side, outer in enumerate((("left", "full"), ("right", "full"))):
        for one in sides[side] if program.how in outer else ():
            if one["id"] not in paired:
                add(one["key"], *((one, None) if side == 0 else (None, one)))
    found = Counter(
        (plain(row["key"]), row["id_left"], plain(row["extra_left"]), row["id_right"],
         plain(row["extra_right"]))
        for row in rows
    )  # fmt: skip
    _equal(found, expected)


def _half(one: Row | None) -> tuple[Any, Any]:
    return (None, None) if one is None else (one["id"], plain(one["extra"]))


def _check_windows(program: Program, rows: Sequence[Row]) -> None:
    held, again = _held(program)
    last: dict[Any, Row] = {}
    emitted: Counter[Any] = Counter()
    for row in rows:
        window = _window_of(program, row)
        last[window] = row
        emitted[window] += 1
    _equal(Counter(last.keys()), Counter(held.keys()))
    for window, records in held.items():
        row = last[window]
        if program.kind.endswith("lists") or program.kind == "co_group":
            ordered = sorted(records, key=lambda one: one["id"])
            assert row["ids"] == [one["id"] for one in ordered], (window, row["ids"])
            assert plain(row["extras"]) == tuple(plain(one["extra"]) for one in ordered), window
        else:
            values = [one["v"] for one in records]
            found = (row["n"], row["total"], row["low"])
            assert found == (len(values), sum(values), min(values)), (window, found, values)
        if window not in again:
            assert emitted[window] == 1, f"{window} is emitted {emitted[window]} times"


def _window_of(program: Program, row: Row) -> Any:
    if "start" in row:
        return plain(row["key"]), row["start"], row["end"]
    bounds = (row["window_start"], row["window_end"])
    return plain(row["key"]), *(round(one.timestamp() * 1000) for one in bounds)


def _held(program: Program) -> tuple[dict[Any, list[Row]], set[Any]]:
    """Return what each window holds at last, and the windows that a late record joined."""
    held: dict[Any, list[Row]] = defaultdict(list)
    again: set[Any] = set()
    if program.kind.startswith("session"):
        return _sessions(program), again
    is_single = all(len(side) == 1 for side in program.sides)
    for side in program.sides:
        for split in side:
            latest = -(2**60)
            for batch in split:
                watermark = latest - DELAY_MS - 1
                for one in batch:
                    for start, end in _windows_of(program, one["at"]):
                        is_due = is_single and end - 1 <= watermark
                        if is_due and end - 1 + program.lateness_ms <= watermark:
                            continue
                        window = (plain(one["key"]), start, end)
                        held[window].append(one)
                        if is_due:
                            again.add(window)
                latest = max([latest, *(one["at"] for one in batch)])
    return held, again


def _windows_of(program: Program, at: int) -> list[tuple[int, int]]:
    size = slide = program.size_ms
    if program.kind.startswith("sliding"):
        slide = program.slide_ms
    last = at - at % slide
    return [(start, start + size) for start in range(last, at - size, -slide)]


def _sessions(program: Program) -> dict[Any, list[Row]]:
    by_key: dict[Any, list[Row]] = defaultdict(list)
    for one in program.records():
        by_key[plain(one["key"])].append(one)
    held: dict[Any, list[Row]] = {}
    for key, records in by_key.items():
        current: list[Row] = []
        for one in sorted(records, key=lambda record: record["at"]):
            # Two sessions that only touch are one.
            if current and one["at"] > current[-1]["at"] + program.size_ms:
                held[_session(key, current, program)] = current
                current = []
            current = [*current, one]
        held[_session(key, current, program)] = current
    return held


def _session(key: Any, records: Sequence[Row], program: Program) -> Any:
    return key, records[0]["at"], records[-1]["at"] + program.size_ms
