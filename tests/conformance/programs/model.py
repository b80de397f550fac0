"""A plain model of a program, which computes the rows that the program must write."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tests.conformance.programs.attempt import Row
from tests.conformance.programs.functions import RECENT_MS, clock_time_of, event_time_of
from tests.conformance.programs.generator import DELAY_MS, FRAME, Program, added_to
from tests.conformance.programs.values import INEXACT, plain
from tests.conformance.programs.version import STATES, History

BEFORE_ALL = -(2**60)


@dataclass(frozen=True)
class Arrival:
    """A record, and how far event time has come when it is processed, as far as that is known."""

    side: int
    record: Row
    watermark: int


Check: TypeAlias = Callable[[Program, History, Sequence[Row]], None]


def check(program: Program, history: History, rows: Sequence[Row]) -> None:
    """Raise AssertionError unless `rows` are what the program must have written."""
    ways: dict[str, Check] = {
        "running": _check_running, "process": _check_process, "interval": _check_pairs,
        "regular": _check_pairs, "result": _check_result, "clock": _check_clock,
        "clock lists": _check_clock,
    }  # fmt: skip
    if program.kind.startswith("session"):
        ways[program.kind] = _check_sessions
    ways.get(program.kind, _check_windows)(program, history, rows)
    if program.has_second_stage:
        _check_stage(rows)


def check_progress(program: Program, phases: int, rows: Sequence[Row]) -> None:
    """Raise AssertionError unless all is written that is due after the first phases.

    All splits are idle then, so none of them holds up another.
    """
    arrivals, watermark = _in_phases(program, phases)
    match program.kind:
        case "process":
            due: set[Any] = {
                (plain(arrival.record["key"]), event_time_of(arrival.record["at"]))
                for arrival in arrivals
            }
            rows = [row for row in rows if row["fired"] is not None and row["part"] == 0]
            written = {(plain(row["key"]), row["fired"]) for row in rows}
        case "running" | "interval" | "session" | "session lists":
            return
        case _:
            due = set(_windows_with(program, arrivals)[0])
            written = {_window_of(program, row) for row in rows}
    is_window = int(program.kind != "process")
    missing = {one for one in due if one[-1] - is_window <= watermark} - written
    early: set[Any] = {one for one in written if one[-1] - is_window > watermark}
    if program.ends_alone and phases == len(program.phases):
        early = set()
    if program.early_results:
        early = set()
    assert not missing, f"not written at {watermark} after {phases} phases: {sorted(missing)[:3]}"
    assert not early, f"written at {watermark} after {phases} phases: {sorted(early)[:3]}"


def _check_stage(rows: Sequence[Row]) -> None:
    """Raise AssertionError unless the results of each key were counted once each."""
    counts: dict[Any, list[int]] = defaultdict(list)
    for row in rows:
        counts[plain(row["key"])].append(row["stage"])
    for key, numbers in counts.items():
        assert sorted(numbers) == [*range(1, len(numbers) + 1)], (key, sorted(numbers))


def _equal(found: Counter[Any], expected: Counter[Any]) -> None:
    missing, more = expected - found, found - expected
    if missing or more:
        raise AssertionError(
            f"missing {list(missing.elements())[:3]} ({sum(missing.values())}),"
            f" not expected {list(more.elements())[:3]} ({sum(more.values())})"
        )


# --- what is processed, and when -----------------------------------------------------------------


def _arrivals(program: Program) -> list[Arrival]:
    """Return the records in an order in which they may be processed."""
    if program.has_idle_splits:
        return _in_phases(program, len(program.phases))[0]
    return list(_in_splits(program))


def _list_records(program: Program) -> list[Row]:
    """Return the records in the order of `_arrivals`."""
    return [arrival.record for arrival in _arrivals(program)]


def _in_splits(program: Program) -> Iterator[Arrival]:
    is_single = len(program.sides) == 1 and len(program.sides[0]) == 1
    for number, side in enumerate(program.sides):
        for split in side:
            latest = BEFORE_ALL
            for batch in split:
                watermark = latest - DELAY_MS - 1 if is_single else BEFORE_ALL
                for record in batch:
                    yield Arrival(number, record, watermark)
                latest = max([latest, *(record["at"] for record in batch)])


def _in_phases(program: Program, phases: int) -> tuple[list[Arrival], int]:
    """Return the records of the first phases, and up to when event time has come behind them."""
    arrivals: list[Arrival] = []
    watermark, done = BEFORE_ALL, Counter[tuple[int, int]]()
    for phase in program.phases[:phases]:
        come_to = watermark
        for side, split, count in phase.batches:
            first = done[side, split]
            done[side, split] += count
            for batch in program.sides[side][split][first : first + count]:
                arrivals += [Arrival(side, record, watermark) for record in batch]
                come_to = max([come_to, *(one["at"] - DELAY_MS - 1 for one in batch)])
        watermark = come_to
    return arrivals, watermark


# --- by record -----------------------------------------------------------------------------------


def _check_result(program: Program, history: History, rows: Sequence[Row]) -> None:
    """Raise AssertionError unless there was nothing to refuse: a run that refuses it ends."""
    kind, value = INEXACT[program.seed % len(INEXACT)]
    assert not list(program.records()), f"{value!r} was written as {kind}: {list(rows)[:3]}"


def _check_running(program: Program, history: History, rows: Sequence[Row]) -> None:
    if program.has_ranks:
        _check_ranks(program, history, rows)
        return
    if program.has_frames:
        _check_frames(program, history, rows)
        return
    expected: Counter[Any] = Counter()
    counts: Counter[Any] = Counter()
    totals: Counter[Any] = Counter()
    evens: Counter[Any] = Counter()
    distinct: dict[Any, set[int]] = defaultdict(set)
    firsts: dict[Any, int] = {}
    for one in _list_records(program):
        key, version = plain(one["key"]), history.version_of(one["id"])
        counts[key] += 1
        totals[key, version.total] += one["v"]
        evens[key] += one["v"] % 2 == 0
        distinct[key].update({one["v"]} if _is_chosen(one["v"]) else ())
        expected[
            key, one["id"], counts[key], totals[key, version.total], evens[key],
            len(distinct[key]), firsts.setdefault(key, one["id"]), one["id"],
            plain(one["extra"]), added_to(one) if version.added else None,
        ] += 1  # fmt: skip
    _equal(_count_running(rows), expected)


def _count_running(rows: Sequence[Row]) -> Counter[Any]:
    """Return how often each record is there with each of its aggregates."""
    names = ("key", "id", "n", "total", "even", "distinct", "first", "last", "extra", "added")
    return Counter(tuple(plain(row.get(name)) for name in names) for row in rows)


def _check_frames(program: Program, history: History, rows: Sequence[Row]) -> None:
    """Raise AssertionError unless each record has the aggregates over its last records."""
    expected: Counter[Any] = Counter()
    of_keys: dict[Any, list[Row]] = defaultdict(list)
    for one in _list_records(program):
        frame = of_keys[plain(one["key"])]
        frame.append(one)
        if program.frame_order is not None:
            frame.sort(key=lambda record: (-record["v"], record["at"]))
        del frame[:-FRAME]
        values = [record["v"] for record in frame]
        expected[
            plain(one["key"]), one["id"], len(frame), sum(values),
            sum(value % 2 == 0 for value in values), len(set(filter(_is_chosen, values))),
            frame[0]["id"], frame[-1]["id"], plain(one["extra"]), _added_of(history, one),
        ] += 1  # fmt: skip
    _equal(_count_running(rows), expected)


def _check_ranks(program: Program, history: History, rows: Sequence[Row]) -> None:
    """Raise AssertionError unless the last record of each rank is the one that has it."""
    of_keys: dict[Any, list[Row]] = defaultdict(list)
    for one in _list_records(program):
        of_keys[plain(one["key"])].append(one)
    expected = Counter(
        (key, rank, one["id"], plain(one["extra"]), _added_of(history, one))
        for key, records in of_keys.items()
        for rank, one in enumerate(
            sorted(records, key=lambda record: (-record["v"], record["at"]))[:FRAME], 1
        )
    )
    last: dict[Any, Row] = {(plain(row["key"]), row["rank"]): row for row in rows}
    found = Counter(
        (*at, row["id"], plain(row["extra"]), row.get("added")) for at, row in last.items()
    )
    _equal(found, expected)


def _is_chosen(value: int) -> bool:
    """Return True if the condition of the distinct count holds: SQL's remainder has a sign."""
    return value > 0 and value % 3 > 0


def _check_process(program: Program, history: History, rows: Sequence[Row]) -> None:
    expected: Counter[Any] = Counter()
    seen: dict[Any, list[int]] = defaultdict(list)
    steps: Counter[Any] = Counter()
    timers: set[tuple[Any, int]] = set()
    again: set[tuple[Any, int]] = set()
    by_clock: set[tuple[Any, int]] = set()
    for arrival in _arrivals(program):
        one = arrival.record
        key, states = plain(one["key"]), STATES[history.version_of(one["id"]).states]
        seen[key].append(one["v"] % 3)
        steps[key] += states.has_steps
        values = (key, one["id"], len(seen[key]),
                  100 * seen[key].count(one["v"] % 3) + len(set(seen[key])))  # fmt: skip
        evolved = (
            len(seen[key]), 7 + 10 * steps[key] if states.has_steps else None,
            seen[key].count(one["v"] % 3), steps[key] if states.has_seen else None,
        )  # fmt: skip
        for part in range(2):
            expected[(*values, part, None, plain(one["extra"]), *evolved)] += 1
        timers.add((key, event_time_of(one["at"])))
        if event_time_of(one["at"]) <= arrival.watermark:
            again.add((key, event_time_of(one["at"])))
        by_clock.add((key, clock_time_of(one["id"])))
    # One that is registered when its time has passed fires once more.
    fired = _fired(rows, 0)
    assert fired.keys() == timers, fired.keys() ^ timers
    assert all(fired[one] == 1 for one in timers - again), fired
    fired = _fired(rows, 1)
    # What waits for the clock where all input has ended does not fire.
    assert fired.keys() <= by_clock if program.ends_alone else fired.keys() == by_clock, fired
    assert max(fired.values(), default=1) == 1, fired
    rows = [row for row in rows if row["id"] is not None]
    names = (
        "key", "id", "n", "amounts", "part", "fired", "extra", "profile", "steps", "tally", "seen",
    )  # fmt: skip
    _equal(Counter(tuple(plain(row[name]) for name in names) for row in rows), expected)
    _check_recent(rows)


def _fired(rows: Sequence[Row], part: int) -> Counter[Any]:
    """Return the timers of one domain that have fired."""
    mine = (row for row in rows if row["id"] is None and row["part"] == part)
    return Counter((plain(row["key"]), row["fired"]) for row in mine)


def _check_recent(rows: Sequence[Row]) -> None:
    """Raise AssertionError unless a value lived as long as it should, by the times written."""
    last: dict[Any, tuple[int, int]] = {}
    by_count = sorted((row for row in rows if row["part"] == 1 and row["n"]), key=lambda r: r["n"])
    for row in by_count:
        before, used_ms = last.get(plain(row["key"]), (0, BEFORE_ALL))
        lives = row["now"] < used_ms + RECENT_MS
        expected = before + 1 if lives else 1
        assert row["recent"] == expected, (row, before, used_ms)
        last[plain(row["key"])] = (row["recent"], row["now"])


# --- pairs ---------------------------------------------------------------------------------------


def _check_pairs(program: Program, history: History, rows: Sequence[Row]) -> None:
    expected: Counter[Any] = Counter()
    sides: list[list[Row]] = [[], []]
    for arrival in _arrivals(program):
        if program.kind == "regular" or arrival.record["at"] > arrival.watermark:
            sides[arrival.side].append(arrival.record)
    paired: set[int] = set()
    upper_ms = 0 if program.ends_at_left else 30

    def add(key: Any, left: Row | None, right: Row | None) -> None:
        expected[(plain(key), *_half(history, left), *_half(history, right))] += 1

    for left in sides[0]:
        for right in sides[1]:
            near = program.kind == "regular" or -50 <= right["at"] - left["at"] <= upper_ms
            if near and plain(left["key"]) == plain(right["key"]):
                add(left["key"], left, right)
                paired |= {left["id"], right["id"]}
    for side, outer in enumerate((("left", "full"), ("right", "full"))):
        for one in sides[side] if program.how in outer else ():
            if one["id"] not in paired:
                add(one["key"], *((one, None) if side == 0 else (None, one)))
    names = ("id_left", "extra_left", "added_left", "id_right", "extra_right", "added_right")
    found = Counter((plain(row["key"]), *(plain(row.get(name)) for name in names)) for row in rows)
    _equal(found, expected)


def _half(history: History, one: Row | None) -> tuple[Any, Any, Any]:
    if one is None:
        return (None, None, None)
    return (one["id"], plain(one["extra"]), _added_of(history, one))


def _added_of(history: History, one: Row) -> int | None:
    """Return the added column of a record: it is null in one that was kept before."""
    return added_to(one) if history.version_of(one["id"]).added else None


# --- windows -------------------------------------------------------------------------------------


def _check_clock(program: Program, history: History, rows: Sequence[Row]) -> None:
    """Raise AssertionError unless each record is in one window by the clock."""
    if program.early_results:
        # The last result of a window is the whole one.
        rows = list({_window_of(program, row): row for row in rows}.values())
    windows = Counter(_window_of(program, row) for row in rows)
    assert not windows or max(windows.values()) == 1, windows.most_common(3)
    expected: Counter[Any] = Counter()
    found: Counter[Any] = Counter()
    for one in _list_records(program):
        key = plain(one["key"])
        if program.kind == "clock lists":
            expected[key, one["id"]] += 1
        else:
            expected[key, "n"] += 1
            expected[key, "total"] += one["v"] + 100
    for row in rows:
        key = plain(row["key"])
        if program.kind == "clock lists":
            found.update((key, number) for number in row["ids"])
        else:
            found[key, "n"] += row["n"]
            found[key, "total"] += row["total"] + 100 * row["n"]
    _equal(found, expected)


def _check_windows(program: Program, history: History, rows: Sequence[Row]) -> None:
    held, again = _windows_with(program, _arrivals(program))
    last: dict[Any, Row] = {}
    emitted: Counter[Any] = Counter()
    for row in rows:
        window = _window_of(program, row)
        if program.early_results and window in last:
            _check_replaces(program, row, last[window])
        last[window] = row
        emitted[window] += 1
    _equal(Counter(last.keys()), Counter(held.keys()))
    for window, records in held.items():
        _check_content(program, history, last[window], records)
        if window not in again and not program.early_results:
            assert emitted[window] == 1, f"{window} is emitted {emitted[window]} times"


def _check_replaces(program: Program, row: Row, before: Row) -> None:
    """Raise AssertionError unless a result of a window has at least what an earlier one had."""
    assert row["n"] >= before["n"], (row, before)
    if "early_interval" not in program.early_results:
        # The last result may come with any record, the others with every second one.
        assert before["n"] >= program.early_results["early_records"], (row, before)


def _check_content(program: Program, history: History, row: Row, records: Sequence[Row]) -> None:
    """Raise AssertionError unless `row` is the result of a window that holds `records`."""
    if program.kind.endswith("lists") or program.kind == "co_group":
        ordered = sorted(records, key=lambda one: one["id"])
        assert row["ids"] == [one["id"] for one in ordered], (row, ordered)
        assert plain(row["extras"]) == tuple(plain(one["extra"]) for one in ordered), row
        if "added" in row:
            assert row["added"] == [_added_of(history, one) for one in ordered], row
    else:
        values = [record["v"] for record in records]
        even = sum(value for value in values if value % 2 == 0)
        found = (row["n"], row["total"], row["low"], row["even"])
        assert found == (len(values), sum(values), min(values), even), (row, values)
        if program.has_chosen:
            assert row["distinct"] == len(set(filter(_is_chosen, values))), (row, values)
            times = [event_time_of(record["at"]) for record in records]
            ids = list(zip(times, (record["id"] for record in records), strict=True))
            # Of records with equal times, any one may have arrived first.
            assert (min(times), row["first"]) in ids, (row, ids)
            assert (max(times), row["last"]) in ids, (row, ids)


def _check_sessions(program: Program, history: History, rows: Sequence[Row]) -> None:
    """Raise AssertionError unless each session was emitted, and each other row is a part of one."""
    sessions: dict[Any, list[Row]] = defaultdict(list)
    for (key, start, end), records in _sessions(program).items():
        sessions[None if program.form else key, start, end] += records
    emitted: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        emitted[_window_of(program, row)].append(row)
    is_late = program.lateness_ms or program.has_idle_splits
    for window, records in sessions.items():
        assert window in emitted, f"{window} is not written; there are {list(emitted)[:5]}"
        _check_content(program, history, emitted[window][-1], records)
        assert is_late or len(emitted[window]) == 1, emitted[window]
    for key, start, end in emitted.keys() - sessions.keys():
        wholes = (
            session
            for session in sessions
            if session[0] == key and session[1] <= start <= end <= session[2]
        )
        is_part = is_late and any(wholes)
        assert is_part, f"{(key, start, end)} is no part of {list(sessions)[:5]}"


def _window_of(program: Program, row: Row) -> Any:
    if "start" in row:
        return plain(row["key"]), row["start"], row["end"]
    bounds = (row["window_start"], row["window_end"])
    return _key_of(program, row), *(round(bound.timestamp() * 1000) for bound in bounds)


def _key_of(program: Program, row: Row) -> Any:
    """Return the key of a result; None if results have no key."""
    return None if program.form else plain(row["key"])


def _windows_with(
    program: Program, arrivals: Sequence[Arrival]
) -> tuple[dict[Any, list[Row]], set[Any]]:
    held: dict[Any, list[Row]] = defaultdict(list)
    again: set[Any] = set()
    for arrival in arrivals:
        for start, end in _windows_of(program, arrival.record["at"]):
            is_due = end - 1 <= arrival.watermark
            if is_due and end - 1 + program.lateness_ms <= arrival.watermark:
                continue
            window = (_key_of(program, arrival.record), start, end)
            held[window].append(arrival.record)
            if is_due:
                again.add(window)
    return held, again


def _windows_of(program: Program, at: int) -> list[tuple[int, int]]:
    size = slide = program.size_ms
    if program.kind.startswith("sliding"):
        slide = program.slide_ms
    last = at - at % slide
    return [(start, start + size) for start in range(last, at - size, -slide)]


def _sessions(program: Program) -> dict[Any, list[Row]]:
    """Return what each session holds at last."""
    held: dict[Any, list[Row]] = {}
    kept: dict[Any, list[list[Row]]] = defaultdict(list)
    for arrival in _arrivals(program):
        key = None if program.form == "all" else plain(arrival.record["key"])
        at = arrival.record["at"]
        gone = arrival.watermark - program.lateness_ms
        mine = [arrival.record]
        others: list[list[Row]] = []
        for records in kept[key]:
            start, end = _bounds(records, program)
            if end - 1 <= gone:
                held[key, start, end] = records
            # Two sessions that only touch are one.
            elif start <= at + program.size_ms and at <= end:
                mine += records
            else:
                others.append(records)
        if len(mine) > 1 or at + program.size_ms - 1 > gone:
            others.append(mine)
        kept[key] = others
    for key, sessions in kept.items():
        held |= {(key, *_bounds(records, program)): records for records in sessions}
    return held


def _bounds(records: Sequence[Row], program: Program) -> tuple[int, int]:
    times = [record["at"] for record in records]
    return min(times), max(times) + program.size_ms
