"""Clauses about rows before they are decided: hidden, durable from pre-commit on, and whole."""

from __future__ import annotations

from onceflow.core.errors import SinkError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.integration.conformance import children
from onceflow.integration.conformance.clause import Violation, clause, expect
from onceflow.integration.conformance.rig import Prepared, Rig


@clause(scenarios=[13, 14])
def hidden_after_write(rig: Rig) -> None:
    """Rows that were only written are seen by nobody."""
    writer = rig.job.writer()
    for _ in range(3):
        writer.write(rig.target.batch(rig.ids(200)))
        rig.expect_seen(when="after write")


@clause(scenarios=[13, 14], rests_on=[hidden_after_write])
def hidden_after_pre_commit(rig: Rig) -> None:
    """Pre-committed rows are seen by nobody, also while the writer goes on."""
    writer = rig.job.writer()
    rig.prepare(1, writer=writer)
    rig.expect_seen(when="after pre_commit")
    writer.write(rig.target.batch(rig.ids()))
    rig.prepare(2, writer=writer)
    rig.expect_seen(when="after the second pre_commit")


@clause(scenarios=[24])
def names_follow_the_checkpoint(rig: Rig) -> None:
    """A transaction is named by sink id, attempt, checkpoint and subtask; no name comes twice."""
    names: set[str] = set()
    for attempt in (1, 2):
        for subtask in (0, 3):
            writer = rig.job.writer(attempt, subtask)
            for checkpoint in (5, 6, 2**31):
                found = rig.prepare(checkpoint, writer=writer).committable.transaction
                parts = (found.sink_id, found.attempt, found.checkpoint, found.subtask)
                expected = (rig.job.sink_id, attempt, checkpoint, subtask)
                expect(parts == expected, f"transaction {found}, and the context says {expected}")
                expect(str(found) not in names, f"transaction {found} is named twice")
                names.add(str(found))
            writer.close()


@clause(scenarios=[1, 13], rests_on=[hidden_after_pre_commit, names_follow_the_checkpoint])
def commit_shows_its_rows(rig: Rig) -> None:
    """A commit shows every row of its own transaction, unaltered and once, and no other row."""
    writer = rig.job.writer()
    first = rig.prepare(1, writer=writer, ids=rig.ids(300))
    second = rig.prepare(2, writer=writer)
    open_ids = rig.ids()
    writer.write(rig.target.batch(open_ids))
    rig.commit_all(first)
    rig.expect_seen(first.ids, when="after commit of 1 of 2 checkpoints")
    rig.commit_all(second)
    rig.expect_seen(first.ids, second.ids, when="after commit of both")
    committable = writer.pre_commit(CheckpointId(3))
    expect(committable is not None, "rows written before a commit were forgotten by the next one")


@clause(scenarios=[19, 36], rests_on=[commit_shows_its_rows])
def empty_checkpoint(rig: Rig) -> None:
    """A checkpoint without rows returns None, prepares nothing, and does not end the writer."""
    writer = rig.job.writer()
    found = [writer.pre_commit(CheckpointId(1))]
    writer.write(rig.target.batch(()))
    found.append(writer.pre_commit(CheckpointId(2)))
    expect(found == [None, None], f"pre_commit without rows returned {found}")
    rig.expect_in_doubt(when="after two checkpoints without rows")
    third = rig.prepare(3, writer=writer)
    expect(writer.pre_commit(CheckpointId(4)) is None, "no row since checkpoint 3, yet not None")
    rig.expect_in_doubt(third, when="after a checkpoint with rows and one without")


@clause(scenarios=[14, 35], rests_on=[commit_shows_its_rows])
def close_keeps_what_is_pre_committed(rig: Rig) -> None:
    """Closing a writer, twice even, neither shows nor rolls back what it has pre-committed."""
    writer = rig.job.writer()
    prepared = rig.prepare(1, writer=writer)
    writer.close()
    writer.close()
    rig.expect_seen(when="after the writer was closed")
    rig.commit_all(prepared)
    rig.expect_seen(prepared.ids, when="after the commit that followed the close")


@clause(scenarios=[14, 16, 36], rests_on=[hidden_after_write])
def close_rolls_back_what_is_open(rig: Rig) -> None:
    """A writer that is closed before pre_commit leaves nothing: no row and nothing in doubt."""
    writer = rig.job.writer()
    writer.write(rig.target.batch(rig.ids(50)))
    writer.close()
    rig.expect_in_doubt(when="after close without pre_commit")
    rig.expect_seen(when="after close without pre_commit")


@clause(scenarios=[14, 16, 31], rests_on=[close_keeps_what_is_pre_committed])
def death_rolls_back_what_is_open(rig: Rig) -> None:
    """A process that is killed after write leaves nothing, and hinders no later writer."""
    ids = rig.ids(50)
    rig.job.begin(1)
    child = rig.processes.start(
        children.write_and_wait, rig.sink, rig.job.writer_context(), rig.target.batch(ids)
    )
    child.said()
    child.kill()
    rig.expect_in_doubt(when="after the writer's process was killed")
    rig.expect_seen(when="after the writer's process was killed")
    again = rig.prepare(1, attempt=2, ids=ids)
    rig.commit_all(again)
    rig.expect_seen(ids, when="after the same rows were written again")


@clause(scenarios=[14, 23, 26, 40], rests_on=[close_keeps_what_is_pre_committed])
def pre_committed_survives_death(rig: Rig) -> None:
    """What a process has pre-committed outlives its SIGKILL: hidden, in doubt, ready to commit."""
    ids = rig.ids(50)
    rig.job.begin(1)
    child = rig.processes.start(
        children.pre_commit_and_wait,
        rig.sink,
        rig.job.writer_context(),
        rig.target.batch(ids),
        1,
    )
    committable = child.said()
    child.kill()
    rig.expect_seen(when="after the process that has pre-committed was killed")
    prepared = Prepared(committable, ids)
    rig.expect_in_doubt(prepared, when="after the process that has pre-committed was killed")
    rig.commit_all(prepared)
    rig.expect_seen(ids, when="after the commit of what a dead process had pre-committed")


@clause(
    scenarios=[22, 43],
    needs=["bad_batch"],
    rests_on=[close_keeps_what_is_pre_committed, close_rolls_back_what_is_open],
)
def bad_batch_is_refused(rig: Rig) -> None:
    """A row that the target can never take fails write or pre_commit; nothing of it remains."""
    writer = rig.job.writer()
    good = rig.prepare(1, writer=writer)
    try:
        writer.write(rig.target.bad_batch(rig.ids()))
        committable = writer.pre_commit(CheckpointId(2))
    except SinkError:
        writer.close()
    else:
        raise Violation(f"bad rows were pre-committed without an error, as {committable}")
    rig.expect_in_doubt(good, when="after a refused batch")
    rig.commit_all(good)
    rig.expect_seen(good.ids, when="after a refused batch")


CLAUSES = (
    hidden_after_write,
    hidden_after_pre_commit,
    names_follow_the_checkpoint,
    commit_shows_its_rows,
    empty_checkpoint,
    close_keeps_what_is_pre_committed,
    close_rolls_back_what_is_open,
    death_rolls_back_what_is_open,
    pre_committed_survives_death,
    bad_batch_is_refused,
)
