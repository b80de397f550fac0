"""The clauses about transactions in doubt, committables, and the proofs of commits."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Generator
from contextlib import contextmanager

from onceflow.core.protocol.checkpoints import snapshots
from onceflow.core.protocol.committables import AlreadyCommitted, Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.log.rules import CheckpointDecided
from onceflow.core.storage.log.record_codec import decode_record, encode_record
from onceflow.integration.conformance import children
from onceflow.integration.conformance.clause import clause
from onceflow.integration.conformance.clauses import deciding
from onceflow.integration.conformance.clauses.writing import close_keeps_what_is_pre_committed
from onceflow.integration.conformance.harness import Harness, Prepared
from onceflow.integration.conformance.sink_job import UID
from onceflow.integration.conformance.target import expect

_PAYLOAD_BYTES_MAX = 64 * 1024
_SECRET_LENGTH_MIN = 6


@clause(scenarios=[23, 25], rests_on=[deciding.abort_leaves_nothing, deciding.commit_again])
def in_doubt_is_exact(harness: Harness) -> None:
    """in_doubt lists exactly the transactions pre-committed and neither committed nor aborted."""
    harness.job.begin(1)
    harness.expect_in_doubt(when="before anything was written")
    first, second, third = (harness.prepare(checkpoint) for checkpoint in (1, 2, 3))
    harness.expect_in_doubt(first, second, third, when="after three checkpoints")
    harness.commit_all(first)
    harness.abort(third)
    harness.expect_in_doubt(second, when="after one was committed and one aborted")
    committer = harness.job.committer()
    listed = list(committer.in_doubt())
    outcome = harness.commit(Prepared(listed[0], second.ids), committer)
    harness.expect_seen(
        first.ids, second.ids, when=f"after commit of what in_doubt had listed: {outcome}"
    )


@clause(scenarios=[7, 25, 32, 38], rests_on=[in_doubt_is_exact])
def in_doubt_of_every_subtask(harness: Harness) -> None:
    """in_doubt lists the transactions of every subtask, even of one that no longer exists."""
    prepared = [harness.prepare(1, subtask=subtask) for subtask in (0, 1, 2, 11)]
    harness.expect_in_doubt(*prepared, when="after four subtasks have pre-committed")


@clause(scenarios=[17, 25], rests_on=[in_doubt_is_exact])
def in_doubt_of_every_attempt(harness: Harness) -> None:
    """in_doubt lists the transactions of every attempt, also in a newer attempt."""
    prepared = [harness.prepare(1, attempt=attempt) for attempt in (1, 2, 11)]
    harness.job.begin(12)
    harness.expect_in_doubt(*prepared, when="after attempts 1, 2 and 11 have pre-committed")


@clause(scenarios=[25], rests_on=[in_doubt_is_exact])
def in_doubt_of_no_other_sink(harness: Harness) -> None:
    """in_doubt lists no other sink id: no prefix, no other case, no match of `_`."""
    own = harness.job.sink_id
    others = [f"{own}.1", f"{own}-1", f"{own}_", own[:-1], f"{own[:-1]}_", own.upper()]
    mine = harness.prepare(1)
    jobs = [harness.another_job(other, log=f"log-{index}") for index, other in enumerate(others)]
    theirs = [harness.prepare(1, job=job) for job in jobs]
    harness.expect_in_doubt(mine, when=f"while sinks {others} have pre-committed")
    for job, prepared in zip(jobs, theirs, strict=True):
        names = [str(prepared.committable.transaction)]
        listed = job.in_doubt()
        expect(listed == names, f"in doubt of sink {job.sink_id} are {listed}, not {names}")
    harness.abort(mine)
    for job, prepared in zip(jobs, theirs, strict=True):
        harness.commit(prepared, job.committer())
    harness.expect_seen(
        *(prepared.ids for prepared in theirs), when="after only the others were committed"
    )


@clause(scenarios=[28], rests_on=[close_keeps_what_is_pre_committed])
def committable_fits_the_log(harness: Harness) -> None:
    """A committable is small for any number of rows, and the log returns it unchanged."""
    few, many = harness.prepare(1), harness.prepare(2, ids=harness.ids(3000))
    size_bytes = len(many.committable.payload)
    expect(size_bytes < _PAYLOAD_BYTES_MAX, f"the payload of 3000 rows has {size_bytes} bytes")
    growth_bytes = size_bytes - len(few.committable.payload)
    expect(growth_bytes < 1024, f"the payload of 3000 rows is {growth_bytes} bytes over that of 3")
    again = through_the_log(few.committable)
    expect(again == few.committable, f"{few.committable} came back from the log as {again}")
    harness.commit_all(
        Prepared(again, few.ids), Prepared(through_the_log(many.committable), many.ids)
    )
    harness.expect_seen(few.ids, many.ids, when="after commit of what came back from the log")


@clause(rests_on=[close_keeps_what_is_pre_committed])
def description_pickles(harness: Harness) -> None:
    """The sink's description can be pickled to other processes and works the same there."""
    data = pickle.dumps(harness.sink)
    again = pickle.loads(data)  # noqa: S301 - pickled just above
    expect(type(again) is type(harness.sink), f"the sink comes back as {type(again)}")
    expect(again.routing_key() == harness.sink.routing_key(), "the copy routes by another key")
    prepared = harness.prepare(1)
    other = harness.job.through(again)
    harness.commit_all(harness.prepare(2, writer=other.writer(first_checkpoint=2)))
    harness.commit(prepared, other.committer())
    expect(pickle.dumps(harness.sink) == data, "the description changed while it was used")


@clause(needs=["secrets"], rests_on=[close_keeps_what_is_pre_committed])
def no_secret_is_kept(harness: Harness) -> None:
    """Committables, a checkpoint's files, the sink's repr and log lines hold no password."""
    secrets = harness.target.secrets()
    for secret in secrets:
        expect(len(secret) >= _SECRET_LENGTH_MIN, "a secret of the target is too short to look for")
    with _collect_log() as lines:
        prepared, aborted = harness.prepare(1), harness.prepare(2)
        staged = [path for path in harness.directory.rglob("*") if path.is_file()]
        kept = b"\n".join(path.read_bytes() for path in staged)
        committer = harness.job.committer()
        listed = [*committer.in_doubt()]
        harness.commit_all(prepared)
        harness.commit(prepared)
        harness.abort(aborted)
        outcome = harness.commit(aborted)
        committer.prune(CheckpointId(2))
    texts = {
        "a committable": repr([prepared.committable, *listed]).encode(),
        "an outcome": repr(outcome).encode(),
        "checkpoint storage": kept,
        "repr(sink)": repr(harness.sink).encode(),
        "str(sink)": str(harness.sink).encode(),
        "repr of a writer or committer": repr([committer, harness.job.writer()]).encode(),
        "the log": "\n".join(lines).encode(),
    }
    for secret in secrets:
        leaks = [name for name, text in texts.items() if secret.encode() in text]
        expect(not leaks, f"a secret stands in {', '.join(leaks)}")


@clause(rests_on=[deciding.commit_again])
def prune_keeps_what_is_asked_for(harness: Harness) -> None:
    """Pruning before a checkpoint keeps the proofs of that checkpoint and of later ones."""
    prepared = [harness.prepare(checkpoint) for checkpoint in (1, 2, 3, 10)]
    harness.commit_all(*prepared)
    committer = harness.job.committer()
    for _ in range(2):
        committer.prune(CheckpointId(2))
    for transaction in prepared[1:]:
        outcome = harness.commit(transaction)
        expect(
            outcome == AlreadyCommitted(),
            f"commit of {transaction.committable.transaction} after prune(2): {outcome}",
        )
    harness.expect_seen(*(transaction.ids for transaction in prepared), when="after prune")


@clause(rests_on=[deciding.commit_again])
def prune_keeps_what_is_in_doubt(harness: Harness) -> None:
    """Pruning removes no pre-committed transaction and no proof of another sink."""
    other = harness.another_job(f"{harness.job.sink_id}.1", log="other-log")
    proven = harness.prepare(1, job=other)
    harness.commit(proven, other.committer())
    prepared = harness.prepare(1)
    harness.job.committer().prune(CheckpointId(50))
    harness.expect_in_doubt(prepared, when="after prune(50)")
    outcome = harness.commit(proven, other.committer())
    expect(outcome == AlreadyCommitted(), f"pruning here, another sink's commit says {outcome}")
    harness.commit_all(prepared)
    harness.expect_seen(prepared.ids, proven.ids, when="after prune(50) and commit")


@clause(rests_on=[deciding.commit_elsewhere])
def committer_closes_and_comes_again(harness: Harness) -> None:
    """A committer can be closed twice, and the next committer works without it."""
    prepared = harness.prepare(1)
    first = harness.job.committer()
    expect(len(first.in_doubt()) == 1, "a committer does not list what a writer has pre-committed")
    first.close()
    first.close()
    outcomes = harness.processes.run(
        children.commit, harness.sink, harness.job.committer_context(), [prepared.committable] * 2
    )
    harness.expect_seen(prepared.ids, when=f"after commits that returned {outcomes}")


def through_the_log(committable: Committable) -> Committable:
    """Write `committable` to a decision log record and return it as read back."""
    operator = snapshots.OperatorSnapshot(UID, committables=(committable,))
    completed = snapshots.CompletedCheckpoint(
        checkpoint=CheckpointId(committable.transaction.checkpoint),
        attempt=AttemptId(committable.transaction.attempt),
        parallelism=1,
        max_parallelism=128,
        snapshots=(snapshots.SubtaskSnapshot(SubtaskRef("sink", 0), (operator,)),),
        triggered_at_ms=0,
        completed_at_ms=0,
    )
    data, _ = encode_record(CheckpointDecided(1, completed.attempt, completed, ""))
    record = decode_record(data, "memory").record
    if not isinstance(record, CheckpointDecided):
        raise TypeError(
            f"the decision log returned a {type(record).__name__}, and not the CheckpointDecided"
            " that was written to it"
        )
    return record.completed.operator(UID)[0][1].committables[0]


@contextmanager
def _collect_log() -> Generator[list[str], None, None]:
    """Collect every log line, at any level."""
    lines: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    root = logging.getLogger()
    handler, level = Collecting(), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


CLAUSES = (
    in_doubt_is_exact,
    in_doubt_of_every_subtask,
    in_doubt_of_every_attempt,
    in_doubt_of_no_other_sink,
    committable_fits_the_log,
    description_pickles,
    no_secret_is_kept,
    prune_keeps_what_is_asked_for,
    prune_keeps_what_is_in_doubt,
    committer_closes_and_comes_again,
)
