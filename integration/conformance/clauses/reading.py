"""The clauses about positions: a reader from any snapshot returns exactly the rows that follow."""

from __future__ import annotations

import time
from itertools import accumulate
from typing import Any

from onceflow.core.protocol.splits import assign_splits
from onceflow.core.spi import Split
from onceflow.integration.conformance import source_children
from onceflow.integration.conformance.clause import SOURCES, clause
from onceflow.integration.conformance.source_harness import ReaderSnapshot, SourceHarness
from onceflow.integration.conformance.target import NotTestable, expect

_POSITION_BYTES_MAX = 64 * 1024


@clause(kit=SOURCES)
def every_row_is_returned_once(harness: SourceHarness) -> None:
    """A reader of all splits returns each row once, in the order of its split."""
    splits = harness.fill()
    ids = sorted(split.id for split in splits)
    expect(
        ids == sorted(harness.rows),
        f"splits() of the source returned {ids}, and the input has {sorted(harness.rows)}",
    )
    reading = harness.open(splits)
    reading.read_all(harness.count_rows())
    harness.expect_rows(reading.keys, harness.rows, "a reader of all splits")


@clause(kit=SOURCES, rests_on=[every_row_is_returned_once])
def position_fits_the_log(harness: SourceHarness) -> None:
    """A snapshot has every split of its reader once, with an id and a position of a few bytes."""
    splits = harness.fill()
    reading = harness.open(splits)
    reading.read(harness.count_rows() // 2)
    for snapshot in (splits, reading.snapshot().splits):
        ids = [split.id for split in snapshot]
        expect(sorted(ids) == sorted(harness.rows), f"a snapshot has the splits {ids}")
        for split in snapshot:
            position: Any = split.position
            expect(
                isinstance(position, bytes) and len(position) <= _POSITION_BYTES_MAX,
                f"the position of {split.id} is {position!r:.200}, and should be bytes, at"
                f" most {_POSITION_BYTES_MAX} of them",
            )


@clause(kit=SOURCES, rests_on=[every_row_is_returned_once])
def snapshot_before_the_first_poll_is_the_start(harness: SourceHarness) -> None:
    """A reader that was never polled returns a snapshot from which all of its rows follow."""
    splits = harness.fill()
    reading = harness.open(splits)
    snapshot = reading.snapshot()
    reading.reader.close()
    when = "a reader from a snapshot that was taken before the first poll"
    harness.expect_rows(harness.read_rest(snapshot), harness.rows, when)


@clause(kit=SOURCES, rests_on=[every_row_is_returned_once])
def snapshot_again_changes_nothing(harness: SourceHarness) -> None:
    """A snapshot without a poll since the last one is equal to it, and moves no position."""
    reading = harness.open(harness.fill())
    deadline = time.monotonic() + harness.patience_s
    while len(reading.keys) < harness.count_rows() and time.monotonic() < deadline:
        reading.poll()
        first, second = reading.snapshot(), reading.snapshot()
        expect(
            sorted(first.splits, key=_by_id) == sorted(second.splits, key=_by_id),
            f"two snapshots without a poll in between differ: {first.splits} and {second.splits}",
        )
        if reading.has_ended:
            break
    harness.expect_rows(reading.keys, harness.rows, "a reader with two snapshots after each poll")


@clause(kit=SOURCES, rests_on=[snapshot_before_the_first_poll_is_the_start])
def positions_are_never_ahead_of_the_rows(harness: SourceHarness) -> None:
    """A reader from a snapshot after any batch returns every row that was not returned before."""
    snapshots = harness.collect_snapshots(harness.fill())
    for snapshot in harness.sample(snapshots):
        keys = harness.read_rest(snapshot)
        harness.expect_none_missing(keys, harness.list_rest(snapshot), _from(snapshot))


@clause(kit=SOURCES, rests_on=[positions_are_never_ahead_of_the_rows])
def replay_from_each_position(harness: SourceHarness) -> None:
    """A reader from a snapshot after any batch returns exactly the rows that followed, in order."""
    snapshots = harness.collect_snapshots(harness.fill())
    for snapshot in harness.sample(snapshots):
        keys = harness.read_rest(snapshot)
        harness.expect_rows(keys, harness.list_rest(snapshot), _from(snapshot))


@clause(kit=SOURCES, rests_on=[replay_from_each_position])
def replay_in_another_process(harness: SourceHarness) -> None:
    """A reader in another process continues from a snapshot as a reader in this process does."""
    snapshots = harness.collect_snapshots(harness.fill())
    snapshot = harness.random.choice(snapshots[1:-1])
    rows = harness.list_rest(snapshot)
    count = sum(map(len, rows.values()))
    batches = harness.processes.run(
        source_children.read_rows, harness.source, snapshot.splits, count, harness.patience_s
    )
    keys = [key for batch in batches for key in harness.list_keys(batch)]
    harness.expect_rows(keys, rows, f"another process: {_from(snapshot)}")


@clause(kit=SOURCES, rests_on=[replay_from_each_position])
def rescaling_returns_each_row_once(harness: SourceHarness) -> None:
    """Splits that move to another number of readers continue there, and each row comes once."""
    splits = {split.id: split for split in harness.fill()}
    if len(splits) < 2:
        raise NotTestable("the input has one split, which only one reader reads")
    keys: list[object] = []
    attempts = [2, 1, 3, len(splits) + 1]
    share = harness.count_rows() // (len(attempts) + 1)
    for attempt, parallelism in enumerate(attempts, 1):
        for subtask, ids in enumerate(assign_splits(sorted(splits), parallelism)):
            own = [splits[split_id] for split_id in ids]
            reading = harness.open(own, subtask=subtask, parallelism=parallelism, attempt=attempt)
            left = sum(_count_left(harness, keys, split_id) for split_id in ids)
            if attempt == len(attempts):
                reading.read_all(left)
            else:
                reading.read(min(left, -(-share // parallelism)))
            splits |= {split.id: split for split in reading.snapshot().splits}
            reading.reader.close()
            keys += reading.keys
    harness.expect_rows(keys, harness.rows, f"attempts with {attempts} readers")


@clause(kit=SOURCES, rests_on=[every_row_is_returned_once])
def rows_by_split_are_exact(harness: SourceHarness) -> None:
    """The result of rows_by_split names the split of every row of the last batch, in order."""
    splits = harness.fill()
    reading = harness.open(splits, by_split=True)
    deadline = time.monotonic() + harness.patience_s
    while len(reading.keys) < harness.count_rows() and time.monotonic() < deadline:
        keys = reading.poll()
        if reading.has_ended:
            break
        if not keys:
            continue
        runs = reading.reader.rows_by_split()
        if runs is None:
            expect(len(splits) == 1, f"rows_by_split returned None for {len(splits)} splits")
            continue
        named = [split_id for split_id, count in runs for _ in range(count)]
        actual = [harness.find_split(key) for key in keys]
        expect(
            named == actual,
            f"rows_by_split returned {list(runs)}, and the rows are of the splits {actual}",
        )
        sizes = reading.batch_sizes
        expect(
            set(accumulate(sizes)) <= {0, *accumulate(count for _, count in runs)},
            f"rows_by_split returned {list(runs)}, but the batches have {list(sizes)} rows: name a"
            " split again for each batch in which it has rows",
        )


def _count_left(harness: SourceHarness, keys: list[object], split_id: str) -> int:
    returned = set(keys)
    return sum(key not in returned for key in harness.rows[split_id])


def _from(snapshot: ReaderSnapshot) -> str:
    return f"a reader from {snapshot}"


def _by_id(split: Split) -> str:
    return split.id


CLAUSES = (
    every_row_is_returned_once,
    position_fits_the_log,
    snapshot_before_the_first_poll_is_the_start,
    snapshot_again_changes_nothing,
    positions_are_never_ahead_of_the_rows,
    replay_from_each_position,
    replay_in_another_process,
    rescaling_returns_each_row_once,
    rows_by_split_are_exact,
)
