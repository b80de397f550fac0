"""The clauses about rows and splits that come and go while a job reads, and about acknowledgement.

A source is told of decided positions by `SourceReader.commit`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from onceflow.core.errors import ConfigError, SourceError
from onceflow.core.spi import Split
from onceflow.integration.conformance.clause import SOURCES, clause
from onceflow.integration.conformance.clauses.reading import replay_from_each_position
from onceflow.integration.conformance.processes import eventually
from onceflow.integration.conformance.source_harness import (
    POLL_S,
    Call,
    ReaderSnapshot,
    Reading,
    SourceHarness,
)
from onceflow.integration.conformance.target import Violation, expect

_NEW_ROWS = 7


@clause(kit=SOURCES, needs=["append"], rests_on=[replay_from_each_position])
def rows_that_come_later_are_returned_once(harness: SourceHarness) -> None:
    """Rows that are put into a split while a reader waits are returned once, also on replay."""
    reading = harness.open(harness.fill_endless())
    reading.read_all(harness.count_rows())
    before = reading.snapshot()
    for split_id in list(harness.rows):
        harness.add_rows(split_id, harness.input.append(split_id, _NEW_ROWS))
    reading.read_all(harness.count_rows())
    reading.reader.close()
    harness.expect_rows(reading.keys, harness.rows, "a reader of rows that came later")
    harness.expect_rows(
        harness.read_rest(before), harness.list_rest(before), f"a reader from {before}"
    )


@clause(kit=SOURCES, rests_on=[replay_from_each_position])
def known_splits_keep_their_positions(harness: SourceHarness) -> None:
    """The result of discover has every known split at the given position."""
    splits = harness.fill()
    reading = harness.open(splits)
    reading.read(harness.count_rows() // 2)
    for known in (tuple(splits), reading.snapshot().splits):
        _expect_same(known, harness.source.discover(known))


def _expect_same(known: Sequence[Split], discovered: Sequence[Split]) -> None:
    positions = {split.id: split.position for split in discovered}
    expect(len(positions) == len(discovered), f"discover returned a split twice: {discovered}")
    for split in known:
        expect(split.id in positions, f"discover leaves out the known split {split.id}")
        expect(
            positions[split.id] == split.position,
            f"discover returned {split.id} at {positions[split.id]!r}, and it was known at"
            f" {split.position!r}",
        )


@clause(
    kit=SOURCES,
    needs=["add_split"],
    rests_on=[known_splits_keep_their_positions],
)
def splits_that_appear_are_read_whole(harness: SourceHarness) -> None:
    """A split that appears is discovered once, at its first row, and each row of it comes once."""
    splits = harness.fill()
    reading = harness.open(splits)
    reading.read(harness.count_rows() // 2)
    before = reading.snapshot()
    split_id, keys = harness.input.add_split(_NEW_ROWS)
    harness.add_rows(split_id, keys)
    discovered = tuple(_discover(harness, before.splits, split_id))
    _expect_same(before.splits, discovered)
    expect(
        len(discovered) == len(before.splits) + 1,
        f"discover returned {[split.id for split in discovered]} after the split {split_id} was"
        " added",
    )
    _expect_same(discovered, harness.source.discover(discovered))
    expect(
        len(harness.source.discover(discovered)) == len(discovered),
        f"discover returned {split_id} again after it was known",
    )
    if harness.source.discovery_interval_s is not None:
        reading.reader.add_splits([split for split in discovered if split.id == split_id])
        ids = [split.id for split in reading.snapshot().splits]
        expect(split_id in ids, f"the snapshot after add_splits lacks {split_id}: {ids}")
        reading.read_all(harness.count_rows())
        harness.expect_rows(reading.keys, harness.rows, "a reader after add_splits")
    reading.reader.close()
    restored = replace(before, splits=discovered)
    when = f"a reader from the result of discover, with the new split {split_id}"
    harness.expect_rows(harness.read_rest(restored), harness.list_rest(restored), when)


def _discover(harness: SourceHarness, known: Sequence[Split], split_id: str) -> Sequence[Split]:
    """Call discover until its result has `split_id`: a server may show a new split late."""
    deadline = time.monotonic() + harness.patience_s
    while True:
        discovered = harness.source.discover(known)
        if split_id in {split.id for split in discovered}:
            return discovered
        if time.monotonic() > deadline:
            raise Violation(f"discover does not return {split_id}, which the input added")
        time.sleep(POLL_S)


@clause(kit=SOURCES, needs=["remove_split"], rests_on=[known_splits_keep_their_positions])
def missing_split_is_refused_by_name(harness: SourceHarness) -> None:
    """An attempt whose split is gone ends with a SourceError or ConfigError that names it."""
    splits = harness.fill()
    reading = harness.open(splits)
    reading.read(harness.count_rows() // 2)
    snapshot = reading.snapshot()
    reading.reader.close()
    split_id = harness.random.choice(sorted(harness.rows))
    name = harness.input.remove_split(split_id)
    try:
        outcome = _attempt(harness, snapshot)
    except (SourceError, ConfigError) as error:
        expect(
            name in str(error),
            f"the split {split_id} is gone, and the error does not name {name!r}: {error}",
        )
        return
    raise Violation(f"the split {split_id} is gone, and an attempt with it {outcome}")


def _attempt(harness: SourceHarness, snapshot: ReaderSnapshot) -> str:
    """Start from `snapshot` as an attempt does. Return what happened if no error was raised."""
    harness.source.validate()
    known = harness.source.discover(snapshot.splits)
    reading = harness.open(known, attempt=2)
    deadline = time.monotonic() + harness.patience_s
    while time.monotonic() < deadline:
        reading.poll()
        if reading.has_ended:
            return "returned the end of the input"
    return f"ran for {harness.patience_s:g} s without an error"


@clause(kit=SOURCES, needs=["count_acknowledged"], rests_on=[replay_from_each_position])
def only_decided_rows_are_acknowledged(harness: SourceHarness) -> None:
    """A source reports rows as done after commit has had their position, and not before."""
    splits = harness.fill()
    harness.collect_snapshots(splits)
    _expect_acknowledged(harness, {}, "after polls, snapshots and close, without a commit,")
    reading = harness.open(splits, attempt=2)
    reading.read(harness.count_rows() // 2)
    decided = reading.snapshot()
    reading.read(harness.count_rows())
    reading.snapshot()
    for _ in range(2):
        Call("commit", partial(reading.reader.commit, decided.splits)).result()
        reading.reader.poll(POLL_S)
    reading.reader.close()

    def is_acknowledged() -> bool:
        return any(harness.input.count_acknowledged(split_id) for split_id in harness.rows)

    is_seen = eventually(is_acknowledged, harness.patience_s)
    _expect_acknowledged(harness, decided.returned, f"after a commit of {decided},")
    expect(
        is_seen,
        f"count_acknowledged() returned 0 for {harness.patience_s:g} s after a commit of {decided}."
        " If the source reports nothing to its server, leave count_acknowledged() out of the input",
    )


def _expect_acknowledged(harness: SourceHarness, decided: Mapping[str, int], when: str) -> None:
    for split_id in harness.rows:
        count = harness.input.count_acknowledged(split_id)
        limit = decided.get(split_id, 0)
        expect(
            count <= limit,
            f"{when} {count} rows of {split_id} are acknowledged, and {limit} are decided: a crash"
            " may lose the others",
        )


@clause(kit=SOURCES, rests_on=[replay_from_each_position])
def acknowledgement_keeps_later_rows(harness: SourceHarness) -> None:
    """Calls of commit that are repeated, late or missing change none of the rows that follow."""
    splits = harness.fill()
    first = harness.open(splits)
    first.read(harness.count_rows() // 3)
    decided = first.snapshot()
    first.read(harness.count_rows() * 2 // 3)
    _commit(first, decided)
    first.reader.close()
    # The attempt dies here: the rows after `decided` were returned, and no decision has them.
    second = harness.open(decided.splits, attempt=2)
    _commit(second, decided)
    before = sum(decided.returned.values())
    second.read(harness.count_rows() * 2 // 3 - before)
    returned = Counter(decided.returned) + Counter(second.count_returned())
    known = decided.keys | set(second.keys)
    later = ReaderSnapshot(second.snapshot().splits, returned, known)
    _commit(second, later)
    _commit(second, decided)
    second.read_all(harness.count_rows() - before)
    when = f"after commits of {later} and again of {decided}: the same reader"
    harness.expect_rows(second.keys, harness.list_rest(decided), when)
    second.reader.close()
    keys = harness.read_rest(later)
    harness.expect_rows(keys, harness.list_rest(later), f"after commits of {later}: a reader")


def _commit(reading: Reading, snapshot: ReaderSnapshot) -> None:
    """Call commit on another thread, as the engine does, and twice."""
    for _ in range(2):
        Call("commit", partial(reading.reader.commit, snapshot.splits)).result()


CLAUSES = (
    rows_that_come_later_are_returned_once,
    known_splits_keep_their_positions,
    splits_that_appear_are_read_whole,
    missing_split_is_refused_by_name,
    only_decided_rows_are_acknowledged,
    acknowledgement_keeps_later_rows,
)
