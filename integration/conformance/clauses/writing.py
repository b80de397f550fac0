"""The clauses about undecided rows: hidden, durable from pre-commit on, and complete."""

from __future__ import annotations

from onceflow.core.errors import InvariantViolation, OnceflowError, SinkError, TargetRefused
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import SinkWriter
from onceflow.core.spi.bad_rows import is_data_at_fault, may_pass
from onceflow.integration.conformance import children
from onceflow.integration.conformance.clause import clause
from onceflow.integration.conformance.harness import Harness, Prepared
from onceflow.integration.conformance.target import Violation, describe_error, expect


@clause(scenarios=[13, 14])
def hidden_after_write(harness: Harness) -> None:
    """Rows that are only written are not visible."""
    writer = harness.job.writer()
    for _ in range(3):
        # Write several batches, so that a sink that buffers rows has sent some.
        writer.write(harness.target.batch(harness.ids(200)))
        harness.expect_seen(when="after write")


@clause(scenarios=[13, 14], rests_on=[hidden_after_write])
def hidden_after_pre_commit(harness: Harness) -> None:
    """Pre-committed rows are not visible, also while the writer continues."""
    writer = harness.job.writer()
    harness.prepare(1, writer=writer)
    harness.expect_seen(when="after pre_commit")
    writer.write(harness.target.batch(harness.ids()))
    harness.prepare(2, writer=writer)
    harness.expect_seen(when="after the second pre_commit")


@clause(scenarios=[24])
def names_follow_the_checkpoint(harness: Harness) -> None:
    """A transaction's name has sink id, attempt, checkpoint and subtask, and no name repeats."""
    names: set[str] = set()
    for attempt in (1, 2):
        for subtask in (0, 3):
            writer, before = harness.job.writer(attempt, subtask, first_checkpoint=5), 4
            # Beyond 31 bits: a target with a narrow field for the number fails here, not after
            # years.
            for checkpoint in (5, 6, 2**31):
                transaction = harness.prepare(checkpoint, writer=writer).committable.transaction
                parts = (transaction.sink_id, transaction.attempt, transaction.subtask)
                expected = (harness.job.sink_id, attempt, subtask)
                expect(
                    parts == expected, f"transaction {transaction}, and the context says {expected}"
                )
                expect(
                    before < transaction.checkpoint <= checkpoint,
                    f"transaction {transaction} of checkpoint {checkpoint}, after {before}",
                )
                before = checkpoint
                expect(str(transaction) not in names, f"transaction {transaction} is named twice")
                names.add(str(transaction))
            writer.close()


@clause(scenarios=[1, 13], rests_on=[hidden_after_pre_commit, names_follow_the_checkpoint])
def commit_shows_its_rows(harness: Harness) -> None:
    """A commit shows every row of its own transaction, unaltered and once, and no other row."""
    writer = harness.job.writer()
    first = harness.prepare(1, writer=writer, ids=harness.ids(300))
    second = harness.prepare(2, writer=writer)
    open_ids = harness.ids()
    # These rows are still open while others are committed. They must not become visible or get
    # lost.
    writer.write(harness.target.batch(open_ids))
    harness.commit_all(first)
    harness.expect_seen(first.ids, when="after commit of 1 of 2 checkpoints")
    harness.commit_all(second)
    harness.expect_seen(first.ids, second.ids, when="after commit of both")
    committables = writer.pre_commit(CheckpointId(3))
    expect(bool(committables), "rows written before a commit were forgotten by the next one")


@clause(scenarios=[19, 36], rests_on=[commit_shows_its_rows])
def empty_checkpoint(harness: Harness) -> None:
    """A checkpoint without rows returns nothing and prepares nothing, and the writer continues."""
    writer = harness.job.writer()
    committables = [*writer.pre_commit(CheckpointId(1))]
    # An empty batch must not prepare a transaction.
    writer.write(harness.target.batch(()))
    committables += writer.pre_commit(CheckpointId(2))
    expect(not committables, f"pre_commit without rows returned {committables}")
    harness.expect_in_doubt(when="after two checkpoints without rows")
    third = harness.prepare(3, writer=writer)
    expect(not writer.pre_commit(CheckpointId(4)), "no row since checkpoint 3, yet a committable")
    harness.expect_in_doubt(third, when="after a checkpoint with rows and one without")


@clause(scenarios=[14, 35], rests_on=[commit_shows_its_rows])
def close_keeps_what_is_pre_committed(harness: Harness) -> None:
    """Closing a writer, even twice, does not show or roll back its pre-committed transactions."""
    writer = harness.job.writer()
    prepared = harness.prepare(1, writer=writer)
    writer.close()
    writer.close()
    harness.expect_seen(when="after the writer was closed")
    harness.commit_all(prepared)
    harness.expect_seen(prepared.ids, when="after the commit that followed the close")


@clause(scenarios=[14, 16, 36], rests_on=[hidden_after_write])
def close_rolls_back_what_is_open(harness: Harness) -> None:
    """A writer that is closed before pre_commit leaves no row and no transaction in doubt."""
    writer = harness.job.writer()
    writer.write(harness.target.batch(harness.ids(50)))
    writer.close()
    harness.expect_in_doubt(when="after close without pre_commit")
    harness.expect_seen(when="after close without pre_commit")


@clause(scenarios=[14, 16, 31], rests_on=[close_keeps_what_is_pre_committed])
def death_rolls_back_what_is_open(harness: Harness) -> None:
    """A process that is killed after write leaves no row and does not block later writers."""
    ids = harness.ids(50)
    harness.job.begin(1)
    child = harness.processes.start(
        children.write_and_wait,
        harness.sink,
        harness.job.writer_context(),
        harness.target.batch(ids),
    )
    child.receive()
    child.kill()
    harness.expect_in_doubt(when="after the writer's process was killed")
    harness.expect_seen(when="after the writer's process was killed")
    # Write the same rows: anything left by the dead writer, such as a lock on a key, would block.
    again = harness.prepare(1, attempt=2, ids=ids)
    harness.commit_all(again)
    harness.expect_seen(ids, when="after the same rows were written again")


@clause(scenarios=[14, 23, 26, 40], rests_on=[close_keeps_what_is_pre_committed])
def pre_committed_survives_death(harness: Harness) -> None:
    """A pre-committed transaction survives its process's SIGKILL: hidden, in doubt, committable."""
    ids = harness.ids(50)
    harness.job.begin(1)
    child = harness.processes.start(
        children.pre_commit_and_wait,
        harness.sink,
        harness.job.writer_context(),
        harness.target.batch(ids),
        1,
    )
    (committable,) = child.receive()
    child.kill()
    harness.expect_seen(when="after the process that has pre-committed was killed")
    prepared = Prepared(committable, ids)
    harness.expect_in_doubt(prepared, when="after the process that has pre-committed was killed")
    harness.commit_all(prepared)
    harness.expect_seen(ids, when="after the commit of what a dead process had pre-committed")


@clause(
    scenarios=[22, 43],
    needs=["bad_batch"],
    rests_on=[close_keeps_what_is_pre_committed, close_rolls_back_what_is_open],
)
def bad_batch_is_refused(harness: Harness) -> None:
    """A row that the target can never accept fails write or pre_commit, and no row remains."""
    writer = harness.job.writer()
    good = harness.prepare(1, writer=writer)
    _write_bad_rows(harness, writer, CheckpointId(2))
    harness.expect_in_doubt(good, when="after a refused batch")
    harness.commit_all(good)
    harness.expect_seen(good.ids, when="after a refused batch")


@clause(scenarios=[22], needs=["bad_batch"], rests_on=[bad_batch_is_refused])
def bad_rows_end_by_name(harness: Harness) -> None:
    """A refused row raises an error that ends the job or names the row, never endless retries."""
    error = _write_bad_rows(harness, harness.job.writer(), CheckpointId(1))
    if isinstance(error, SinkError):
        is_end = error.retry == "never" or isinstance(error, TargetRefused)
        expect(
            is_end or is_data_at_fault(error),
            f"bad rows were refused by {describe_error(error)}: a job takes that for a target that"
            " is away and restarts without an end; raise BadRow, or TargetRefused where the target"
            " does not name the row",
        )
    harness.expect_in_doubt(when="after a refused batch")


@clause(scenarios=[22], needs=["bad_batch"], rests_on=[bad_batch_is_refused])
def own_error_for_a_bad_row_ends_by_name(harness: Harness) -> None:
    """A refused row that raises the sink's own error class is not taken for a network failure."""
    error = _write_bad_rows(harness, harness.job.writer(), CheckpointId(1))
    expect(
        isinstance(error, SinkError) or not may_pass(error),
        f"bad rows were refused by {describe_error(error)}: a job takes an error of this name, or"
        " with this cause, for a network or a disk that fails, and restarts without an end; raise"
        " BadRow, TargetRefused, or an error class that has no word for a connection in its name",
    )


def _write_bad_rows(harness: Harness, writer: SinkWriter, checkpoint: CheckpointId) -> Exception:
    """Write and pre-commit rows that include a refused row. Close `writer`, return the error.

    An error class of the sink's own counts as a refusal, as in a job.

    Raises:
        Violation: The rows were pre-committed.
    """
    try:
        writer.write(harness.target.bad_batch(harness.ids()))
        committables = writer.pre_commit(checkpoint)
    except SinkError as error:
        refusal: Exception = error
    except (OnceflowError, InvariantViolation):
        raise
    except Exception as error:
        refusal = error
    else:
        raise Violation(f"bad rows were pre-committed without an error, as {committables}")
    writer.close()
    return refusal


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
    bad_rows_end_by_name,
    own_error_for_a_bad_row_ends_by_name,
)
