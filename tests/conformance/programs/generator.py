"""Random programs: a pipeline, its input, and what it is put through."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from tests.conformance.programs.attempt import Row, new_pipeline
from tests.conformance.programs.calls import answer
from tests.conformance.programs.functions import (
    BatchIds,
    ByRecord,
    EqualNumbers,
    Ids,
    Lists,
    Returned,
)
from tests.conformance.programs.source import WrittenSource
from tests.conformance.programs.values import EXTRAS, INEXACT, INSTANTS, KEYS
from tests.conformance.programs.version import Version
from tests.support.directory_sink import DirectorySink

from onceflow import (
    EventTimeSessionWindows,
    Pipeline,
    SlidingEventTimeWindows,
    Stream,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WatermarkStrategy,
    count,
    count_distinct,
    desc,
    first,
    last,
    min_,
    sum_,
)
from onceflow.core.plan.work import Order

KINDS = (
    "running", "process", "tumbling", "sliding", "session", "tumbling lists", "sliding lists",
    "session lists", "interval", "regular", "co_group", "result", "clock", "clock lists",
)  # fmt: skip
IN_WINDOWS = frozenset(KINDS) - {"result", "running", "process", "interval", "regular"}
EVEN = "v % 2 = 0"
"""A condition of an aggregate."""
CHOSEN = {
    "distinct": count_distinct("v", where="v % 3 > 0"),
    "first": first("id"),
    "last": last("id"),
}
"""Aggregates that keep values, which cannot be merged before an exchange."""
FRAME = 3
"""The number of records of `over` and `top_n`."""
CALLS_MAX = 3
"""The number of calls that run at once."""
OF_TWO_STREAMS = ("interval", "regular", "co_group")
WITH_IDLE_SPLITS = frozenset(KINDS) - {"regular", "result", "clock", "clock lists"}
ACTIONS = (
    "checkpoint", "kill", "stop", "savepoint", "stop with savepoint", "abort", "abort and kill",
)  # fmt: skip
DELAY_MS = 20
IDLE_AFTER_S = 10.0
"""By a clock that stands while splits are read: all of them are idle at the end of a phase."""


@dataclass(frozen=True)
class Phase:
    """Some splits have more records, and what a job is put through meanwhile."""

    batches: tuple[tuple[int, int, int], ...]
    """Source, split, and how many batches of it can be read from now on."""
    actions: tuple[str, ...]


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
    phases: tuple[Phase, ...]
    has_idle_splits: bool
    """Whether the splits have records in turn, one a phase, and are idle at its end."""
    has_second_stage: bool
    """Whether results are counted by key, behind another exchange."""
    ends_alone: bool
    """Whether readers end as soon as they have read their splits."""
    form: str
    """"all": windows without a key. "again": results of windows by their window. Else ""."""
    overtakes: bool
    """Whether barriers overtake rows."""
    sources: list[WrittenSource] = field(
        default_factory=list[WrittenSource], init=False, compare=False
    )
    readable: dict[tuple[int, int], int] = field(
        default_factory=dict[tuple[int, int], int], init=False, compare=False
    )
    """By source and split, how many batches can be read."""

    @property
    def ends_at_left(self) -> bool:
        """True if the interval of an interval join ends at a column: the left record's time."""
        return self.seed % 2 == 1

    @property
    def has_frames(self) -> bool:
        """True if the running aggregates are over the last `FRAME` records of a key."""
        return self.seed % 3 != 0

    @property
    def has_calls(self) -> bool:
        """True if a service answers each record before the work."""
        return self.seed % 11 in (4, 5)

    @property
    def has_ranks(self) -> bool:
        """True if the first `FRAME` records of a key are kept, and no aggregates."""
        return self.seed % 6 == 0

    @property
    def frame_order(self) -> tuple[Order, ...] | None:
        """The order of the last records, or None for that of arrival."""
        return (desc("v"), Order("at")) if self.seed % 3 == 1 else None

    @property
    def early_results(self) -> dict[str, Any]:
        """When windows emit results before they are due; empty for never."""
        if self.kind not in ("tumbling", "sliding", "clock") or self.form or self.seed % 2:
            return {}
        early: dict[str, Any] = {}
        if self.seed % 4 or self.kind == "sliding":
            early["early_interval"] = 0.2
        if self.seed % 8 != 2 and self.kind != "sliding":
            early["early_records"] = 2
        return early

    @property
    def is_union(self) -> bool:
        """True if several sources form one stream."""
        return len(self.sides) > 1 and self.kind not in OF_TWO_STREAMS

    def schema(self, version: Version = Version()) -> pa.Schema:  # noqa: B008 - a frozen value
        """Return the columns of every source."""
        columns = [
            (version.key, self.key[0]), ("at", pa.int64()), ("v", pa.int64()), ("id", pa.int64()),
            ("extra", self.extra[0]),
        ]  # fmt: skip
        return pa.schema([*columns, ("added", pa.int64())] if version.added else columns)

    def records(self, side: int = 0) -> Iterator[Row]:
        """Yield the records of a source."""
        for split in self.sides[side]:
            for batch in split:
                yield from batch

    def pipeline(self, version: Version) -> Pipeline:
        """Return the pipeline, with new sources."""
        pipeline = new_pipeline()
        self.sources.clear()
        schema = self.schema(version)
        for number, side in enumerate(self.sides):
            parts = tuple(tuple(_batch(rows, schema) for rows in split) for split in side)
            self.sources.append(
                WrittenSource(parts, schema, number, self.readable, self.ends_alone)
            )
        idle_after = IDLE_AFTER_S if self.has_idle_splits else None
        watermarks = WatermarkStrategy("at", DELAY_MS / 1000, idle_after=idle_after)
        streams = [
            pipeline.read(source, uid=f"records-{number}", watermarks=watermarks)
            for number, source in enumerate(self.sources)
        ]
        if version.map_uid is not None:
            streams = [
                stream.map_batches(keep_batch, uid=f"{version.map_uid}-{number}")
                for number, stream in enumerate(streams)
            ]
        if self.seed % 7 == 5:
            streams = [_look_up(stream) for stream in streams]
        if self.has_calls:
            streams = [
                stream.async_map(answer, uid=f"calls-{number}", capacity=CALLS_MAX)
                for number, stream in enumerate(streams)
            ]
        if self.is_union:
            streams = [streams[0].union(*streams[1:])]
        results = self._result_of(streams, version)
        if self.has_second_stage:
            results = results.key_by(version.key).running(stage=count(), uid="stage")
        results.write(DirectorySink("/nowhere"), uid="out")
        return pipeline

    def _result_of(self, streams: Sequence[Stream], version: Version) -> Stream:
        keyed = [stream.key_by(version.key) for stream in streams]
        stream = keyed[0]
        match self.kind:
            case "running":
                aggregates = {"n": count(), version.total: sum_("v"), "even": count(where=EVEN)}
                aggregates |= CHOSEN
                if self.has_ranks:
                    return stream.top_n(FRAME, by=[desc("v"), "at"], uid="work")
                if self.has_frames:
                    ordered = _ordered(aggregates, version)
                    return stream.over(FRAME, by=self.frame_order, **ordered, uid="work")
                return stream.running(**_ordered(aggregates, version), uid="work")
            case "result":
                kind, value = INEXACT[self.seed % len(INEXACT)]
                last = max((record["id"] for record in self.records()), default=0)
                schema = pa.schema([("id", pa.int64()), ("made", kind)])
                return streams[0].map(Returned(last, value), schema=schema)
            case "process":
                return stream.process(ByRecord(version), uid="work")
            case "interval":
                joined = stream.interval_join(keyed[1], how=self.how)
                return joined.between(-0.05, "at" if self.ends_at_left else 0.03).merge(uid="work")
            case "regular":
                return stream.join(keyed[1], how=self.how, ttl="1 h").merge(uid="work")
            case "co_group":
                windows = stream.connect(keyed[1]).window(self.windows())
                if version.is_reversed:
                    return windows.co_group_batches(BatchIds(version), uid="work")
                return windows.co_group(Ids(version), uid="work")
            case _:
                return self._in_windows(streams[0], version)

    def _in_windows(self, stream: Stream, version: Version) -> Stream:
        lateness = self.lateness_ms / 1000
        windowed = stream.key_by(version.key).window(
            self.windows(), allowed_lateness=lateness, **self.early_results
        )
        if self.kind.endswith("lists"):
            return windowed.process(Lists(version), uid="work")
        aggregates = {
            "n": count(), "total": sum_("v"), "low": min_("v"), "even": sum_("v", where=EVEN),
        }  # fmt: skip
        if self.has_chosen:
            aggregates |= CHOSEN
        if self.form == "all":
            together = stream.window_all(self.windows(), allowed_lateness=lateness)
            return together.aggregate(**_ordered(aggregates, version), uid="work")
        results = windowed.aggregate(**_ordered(aggregates, version), uid="work")
        if self.form == "again":
            merged = {"n": sum_("n"), "total": sum_("total"), "low": min_("low")}
            return results.per_window().aggregate(**merged, even=sum_("even"), uid="again")
        return results

    @property
    def has_chosen(self) -> bool:
        """True if windows have the aggregates `CHOSEN`: without a key, only some programs."""
        return self.form == "" or (self.form == "all" and self.seed % 2 == 0)

    def changed(self) -> Program | None:
        """Return a program that would misread this one's state, if there is such a one."""
        if self.kind in ("running", "result", "interval", "regular"):
            return None
        if self.kind == "process" or (self.seed % 2 and self.form != "all"):
            kind, values = KEYS[0] if pa.types.is_integer(self.key[0]) else KEYS[5]
            return replace(self, key=(kind, tuple(values)), sides=((),) * len(self.sides))
        return replace(self, size_ms=self.size_ms + 10, sides=((),) * len(self.sides))

    def windows(self) -> Any:
        """Return the windows."""
        if self.kind.startswith("clock"):
            return TumblingProcessingTimeWindows(self.size_ms / 1000)
        if self.kind.startswith("sliding"):
            return SlidingEventTimeWindows(self.size_ms / 1000, self.slide_ms / 1000)
        if self.kind.startswith("session"):
            return EventTimeSessionWindows(self.size_ms / 1000)
        return TumblingEventTimeWindows(self.size_ms / 1000)


def _look_up(stream: Stream) -> Stream:
    """Return the stream with its column `v` from a table that changes."""
    columns = stream.schema.names
    renamed = stream.project(*("v AS w" if name == "v" else name for name in columns))
    return renamed.lookup_join(EqualNumbers(), on="w", keys_max=3).project(*columns)


def keep_batch(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch as it is."""
    return rows


def _ordered(aggregates: dict[str, Any], version: Version) -> dict[str, Any]:
    return dict(reversed(aggregates.items())) if version.is_reversed else aggregates


def _batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array([_value(row, one.name) for row in rows], one.type) for one in schema]
    return pa.record_batch(arrays, schema=schema)


def _value(row: Row, column: str) -> Any:
    match column:
        case "clef":
            return row["key"]
        case "added":
            return added_to(row)
        case _:
            return row[column]


def added_to(row: Row) -> int:
    """Return what a record has in the column that some versions add."""
    return 3 * int(row["id"])


def program_of(seed: int) -> Program:
    """Return the program of a seed."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    has_idle_splits = kind in WITH_IDLE_SPLITS and rng.random() < 0.3
    in_windows = kind in IN_WINDOWS
    keys = rng.choice(KEYS if in_windows or rng.random() < 0.5 else INSTANTS)
    extra = rng.choice(EXTRAS)
    takes_late = in_windows and kind.split()[0] in ("tumbling", "sliding", "session")
    late = takes_late and not has_idle_splits and rng.random() < 0.7
    ordered = kind in ("running", "process") and not has_idle_splits
    sides = 2 if kind in OF_TWO_STREAMS or not (ordered or late or rng.random() < 0.7) else 1
    # What a reader with several splits had told at its end depends on which they were.
    ends_alone = has_idle_splits and sides > 1 and rng.random() < 0.5
    splits = 1 if ordered or late or ends_alone else rng.randint(1, 3)
    lateness_ms = rng.choice([0, 60, 200]) if late or (takes_late and has_idle_splits) else 0
    written = tuple(
        tuple(
            _split(rng, keys[1], extra[1], side * 1000 + split * 100, late=late)
            for split in range(splits)
        )
        for side in range(sides)
    )
    size_ms = rng.choice([40, 100, 130])
    slide_ms = rng.choice([size_ms, size_ms // 2, 30])
    how = rng.choice(["inner", "left", "right", "full"])
    actions = tuple(rng.choices(ACTIONS, k=rng.randint(1, 5)))
    batches = tuple(
        (side, split, len(batches))
        for side, of_side in enumerate(written)
        for split, batches in enumerate(of_side)
    )
    phases = _phases(rng, batches) if has_idle_splits else (Phase(batches, actions),)
    has_second_stage = kind != "result" and rng.random() < 0.4
    overtakes = not late and rng.random() < 0.5
    if in_windows and rng.random() < 0.2:
        keys, written = _with_instants(rng, keys[1], written)
    form = "" if has_second_stage else _form_of(rng, kind, lateness_ms or has_idle_splits)
    return Program(
        seed, kind, (keys[0], tuple(keys[1])), (extra[0], tuple(extra[1])), written, size_ms,
        slide_ms, lateness_ms, how, phases, has_idle_splits,
        has_second_stage=has_second_stage,
        ends_alone=ends_alone,
        form=form,
        overtakes=overtakes,
    )  # fmt: skip


def _with_instants(
    rng: random.Random, old: Sequence[Any], written: Sequence[Sequence[Sequence[Sequence[Row]]]]
) -> tuple[tuple[pa.DataType, Sequence[Any]], tuple[tuple[tuple[tuple[Row, ...], ...], ...], ...]]:
    """Return a type of timestamps with its values, and the rows with these as their keys."""
    instants = rng.choice(INSTANTS)
    new = [instants[1][number % len(instants[1])] for number in range(len(old))]
    rows = tuple(
        tuple(
            tuple(
                tuple(row | {"key": new[old.index(row["key"])]} for row in batch) for batch in split
            )
            for split in side
        )
        for side in written
    )
    return instants, rows


def _form_of(rng: random.Random, kind: str, emits_again: int) -> str:
    """Return the form of windows. Results that may be emitted again are not grouped again."""
    if kind not in ("tumbling", "sliding", "session"):
        return ""
    return rng.choice(["", "all", "all"] if emits_again else ["", "all", "again"])


def _phases(rng: random.Random, batches: Sequence[tuple[int, int, int]]) -> tuple[Phase, ...]:
    """Return phases in each of which one split goes on."""
    left = {(side, split): count for side, split, count in batches if count}
    phases: list[Phase] = []
    while left:
        one = rng.choice(sorted(left))
        taken = rng.randint(1, left[one])
        left[one] -= taken
        if not left[one]:
            del left[one]
        actions = tuple(rng.choices(ACTIONS, k=rng.choice([0, 1, 1, 2])))
        phases.append(Phase(((*one, taken),), actions))
    return tuple(phases)


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
