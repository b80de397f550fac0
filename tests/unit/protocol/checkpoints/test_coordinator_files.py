"""Which state files are deleted, and above all which are not (S58)."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.protocol.checkpoints.coordination import (
    SINKS,
    SOURCES,
    SUBTASKS,
    Coordination,
    completed,
    of_type,
    private,
    shared,
    snapshot,
)

from onceflow.core.protocol.checkpoints import decisions
from onceflow.core.protocol.checkpoints.coordinator import CheckpointSettings

ONE = CheckpointSettings(interval_s=1.0, tolerable_failures=99)
TWO = CheckpointSettings(interval_s=1.0, max_concurrent=2, tolerable_failures=99)


def test_shared_file_lives_until_the_last_checkpoint_that_names_it_is_dropped() -> None:
    """S58: CP1 and CP2 name CP0's file; dropping CP0 deletes nothing of it, the last drop does."""
    job = Coordination(CheckpointSettings(interval_s=1.0, retained=2), [completed(0, shared("s"))])
    job.complete(job.trigger(), shared("s"), private("p1"))
    job.complete(job.trigger(), shared("s"), private("p2"))
    assert job.retained == [1, 2]
    assert job.deleted == []
    job.complete(job.trigger(), private("p3"))
    assert job.deleted == ["p1"]
    job.complete(job.trigger(), private("p4"))
    assert sorted(job.deleted) == ["p1", "p2", "s"]


def test_restored_checkpoints_count_their_references() -> None:
    """S58: after a restore, a file of the restored checkpoint alone is deleted once."""
    job = Coordination(ONE, [completed(4, shared("s"), shared("only 4"), private("p4"))])
    job.complete(job.trigger(), shared("s"))
    assert sorted(job.deleted) == ["only 4", "p4"]


def test_a_file_that_two_subtasks_of_the_restored_checkpoint_name_goes_with_that_checkpoint() -> (
    None
):
    """After a rescale, two subtasks may have gone on with one file, and a restart finds it so."""
    named_twice = (snapshot(SINKS[0], shared("s")), snapshot(SINKS[1], shared("s"), private("p")))
    job = Coordination(ONE, [replace(completed(4), snapshots=named_twice)])
    kept = job.trigger()
    job.ack(kept, SINKS[0], shared("s"))
    for subtask in (*SOURCES, SINKS[1]):
        job.ack(kept, subtask)
    job.logged(kept)
    job.committed(kept)
    assert job.deleted == ["p"]
    job.complete(job.trigger())
    assert job.deleted == ["p", "s"]


def test_more_checkpoints_than_retained_in_the_log_are_dropped_with_the_next() -> None:
    job = Coordination(ONE, [completed(n, private(f"p{n}")) for n in (1, 2, 3)])
    job.complete(job.trigger())
    assert sorted(job.deleted) == ["p1", "p2", "p3"]


def test_aborted_checkpoint_keeps_the_files_that_it_shares_with_a_retained_one() -> None:
    job = Coordination(ONE, [completed(0, shared("s"))])
    n = job.trigger()
    job.ack(n, SINKS[0], shared("s"), shared("new"), private("p"))
    job.decline(n)
    assert sorted(job.deleted) == ["new", "p"]


def test_file_that_a_pending_checkpoint_may_still_name_is_not_deleted() -> None:
    """The trap of incremental state with two checkpoints in flight.

    2 was triggered while 1 was not known complete, so 2 uploads its own copy. 3 is snapshotted when
    1 is known complete, and re-uses 1's file. 2 completes and subsumes 1 before 3's ack arrives.
    """
    job = Coordination(TWO)
    first, second = job.trigger(), job.trigger()
    job.complete(first, shared("of 1"))
    third = job.trigger()
    job.ack_all(second, shared("of 2"))
    job.logged(second)
    job.committed(second)
    assert job.deleted == []
    job.complete(third, shared("of 1"))
    assert job.deleted == ["of 2"]
    job.complete(job.trigger(), shared("of 4"))
    assert job.deleted == ["of 2", "of 1"]


def test_file_is_kept_until_every_subtask_knows_that_it_is_no_longer_retained() -> None:
    """A subtask that has not heard of 2 still takes 1 for the newest, and re-uses its files."""
    job = Coordination(ONE)
    job.complete(job.trigger(), shared("of 1"))
    second = job.trigger()
    job.ack_all(second, shared("of 2"))
    job.logged(second)
    job.committed(second, SUBTASKS[:-1])
    assert job.deleted == []
    third = job.trigger()
    job.ack(third, SUBTASKS[-1], shared("of 1"))
    job.committed(second, SUBTASKS[-1:])
    for subtask in SUBTASKS[:-1]:
        job.ack(third, subtask)
    job.logged(third)
    assert "of 1" not in job.deleted
    job.committed(third)
    assert job.deleted == ["of 2"]


def test_file_of_an_aborted_checkpoint_waits_for_the_checkpoints_triggered_before() -> None:
    job = Coordination(TWO)
    job.complete(job.trigger(), shared("of 1"))
    second, third = job.trigger(), job.trigger()
    job.ack(second, SINKS[0], shared("of 1"), shared("of 2"))
    job.decline(second)
    assert job.deleted == []
    job.complete(third, shared("of 1"))
    assert job.deleted == ["of 2"]


def test_late_ack_never_deletes_a_file_that_a_live_checkpoint_names() -> None:
    """S56, S58: the ack of a dead checkpoint names a live shared file and two of its own."""
    job = Coordination(ONE, [completed(0, shared("s"))])
    first = job.trigger()
    job.decline(first)
    second = job.trigger()
    job.ack(second, SINKS[0], shared("s"), shared("t"))
    job.ack(first, SINKS[1], shared("s"), shared("t"), private("p"), shared("u"))
    assert job.deleted == ["p"]
    for subtask in (*SUBTASKS[:2], SINKS[1]):
        job.ack(second, subtask)
    job.logged(second)
    job.committed(second)
    assert sorted(job.deleted) == ["p", "u"]


def test_late_ack_after_the_job_has_finished_leaves_no_file() -> None:
    """I9: a checkpoint timed out, its upload went on, and the job ended before it was through."""
    job = Coordination(ONE, [completed(0, shared("s"))])
    first = job.trigger()
    job.decline(first)
    stop = job.coordinator.request(decisions.CheckpointKind.STOP, job.now_s)
    (last,) = of_type(decisions.Barrier, stop or job.tick(10.0))
    job.complete(last.checkpoint, shared("s"))
    assert of_type(decisions.FinishJob, job.decisions)
    job.ack(first, SINKS[1], shared("s"), shared("t"), private("p"))
    assert sorted(job.deleted) == ["p", "t"]


def test_inline_state_is_never_deleted() -> None:
    job = Coordination(ONE)
    n = job.trigger()
    job.ack(n, SINKS[0], private(""))
    job.decline(n)
    assert job.deleted == []


@settings(max_examples=100, deadline=None)
@given(data=st.data(), retained=st.integers(1, 3), concurrent=st.integers(1, 3))
def test_no_schedule_deletes_a_file_that_is_named_or_leaves_one_that_is_not(
    data: st.DataObject, retained: int, concurrent: int
) -> None:
    """A backend that re-uses files of the newest checkpoint that *it* knows complete.

    One subtask with state; what it hears (complete, abort) lags behind what is decided by any
    amount. At every completion all its files must exist; at the end nothing else may.
    """
    job = Coordination(
        CheckpointSettings(
            interval_s=1.0, max_concurrent=concurrent, tolerable_failures=10**6, retained=retained
        )
    )
    stateful = SUBTASKS[-1]
    files: dict[int, frozenset[str]] = {}  # by checkpoint: what its ack names, or will name
    uploaded: set[str] = set()
    heard = 0  # decisions that the subtask has heard of
    unacked: list[int] = []
    last_snapshot = 0
    for step in range(data.draw(st.integers(5, 60), label="steps")):
        match data.draw(st.sampled_from(["tick", "snapshot", "ack", "others", "hear", "decline"])):
            case "tick":
                job.tick(after_s=1.0)
            case "snapshot":
                ahead = [n for n in job.pending if n > last_snapshot]
                if ahead:
                    last_snapshot = n = ahead[0]
                    known = job.notified[heard - 1] if heard else -1
                    reused: frozenset[str] = files.get(known, frozenset())
                    kept = {path for path in sorted(reused) if data.draw(st.booleans())}
                    new = f"{n}/{step}"
                    uploaded.add(new)
                    files[n] = frozenset({*kept, new})
                    unacked.append(n)
            case "ack":
                if unacked:
                    n = unacked.pop(data.draw(st.integers(0, len(unacked) - 1)))
                    job.ack(n, stateful, *map(shared, sorted(files[n])))
            case "others":
                if job.pending:
                    n = data.draw(st.sampled_from(job.pending))
                    for subtask in SUBTASKS[:-1]:
                        job.ack(n, subtask)
            case "hear":
                if heard < len(job.notified):
                    heard += 1
                    job.committed(job.notified[heard - 1])
            case "decline":
                if job.pending:
                    job.decline(data.draw(st.sampled_from(job.pending)))
            case _:
                raise AssertionError
        if job.appending is not None:
            if data.draw(st.booleans(), label="append stands"):
                job.logged(job.appending)
            else:
                job.append_failed(job.appending)
        live = {path for n in job.retained for path in files[n]}
        assert not live & set(job.deleted), f"deleted files that {job.retained} name"
    while job.pending or unacked:
        for n in list(unacked):
            unacked.remove(n)
            job.ack(n, stateful, *map(shared, sorted(files[n])))
            if job.appending is not None:
                job.logged(job.appending)
        for pending in job.pending:
            job.decline(pending)
    if job.notified:
        job.committed(job.notified[-1])
    live = {path for n in job.retained for path in files[n]}
    assert uploaded - set(job.deleted) == live
