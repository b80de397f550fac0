"""Transactions in doubt at every sink: seen with what the log says, never settled against it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.aged_log import HOUR_S, AgedLog
from tests.support.directory_sink import DirectorySink
from tests.support.staged_sink import StagedSink

from onceflow.core.commit import by_hand
from onceflow.core.errors import ConfigError, Fenced
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId, sink_id_of
from onceflow.core.protocol.log.target_records import LoggedDecision, RecoveryAction, Resolution
from onceflow.core.spi import CommitterContext, Sink, WriterContext

SINK_ID = "payments.out"
SCHEMA = pa.schema([pa.field("id", pa.int64())])


@pytest.fixture
def log(tmp_path: Path) -> AgedLog:
    log = AgedLog(tmp_path / "checkpoints")
    log.claim()
    log.decide(0)
    return log


@pytest.fixture(params=["prepared", "staged"])
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Sink:
    if request.param == "staged":
        return StagedSink(str(tmp_path / "rows.sqlite"))
    return DirectorySink(str(tmp_path / "out"))


def ids_in(sink: Sink) -> list[int]:
    if isinstance(sink, DirectorySink):
        return sorted(row["id"] for row in sink.rows())
    assert isinstance(sink, StagedSink)
    return sink.ids()


def pre_commit(
    log: AgedLog, sink: Sink, attempt: int, checkpoint: int, *ids: int
) -> committables.Committable:
    staging = log.storage.staging(SINK_ID)
    number = AttemptId(attempt)
    sink.open(CommitterContext("payments", "out", SINK_ID, number, log.log_id, staging), SCHEMA)
    writer = sink.writer(
        WriterContext(
            "payments", "out", SINK_ID, 0, 1, number, CheckpointId(1), SCHEMA, staging=staging
        )
    )
    writer.write(pa.record_batch([pa.array(ids, pa.int64())], schema=SCHEMA))
    (committable,) = writer.pre_commit(CheckpointId(checkpoint))
    writer.close()
    return committable


def transactions_of(log: AgedLog, sink: Sink) -> by_hand.InDoubtTransactions:
    return by_hand.InDoubtTransactions([by_hand.SinkResourceManager(sink, SINK_ID)], log.storage)


def test_decided_rows_are_committed_once_and_never_rolled_back(log: AgedLog, sink: Sink) -> None:
    log.decide(1, [pre_commit(log, sink, 1, 1, 10, 11)])
    with transactions_of(log, sink) as transactions:
        (one,) = transactions.in_doubt()
        assert (one.status.decision, one.status.recovery_action) == (
            LoggedDecision.DECIDED,
            RecoveryAction.COMMIT,
        )
        assert one.rows == 2
        with pytest.raises(by_hand.ContradictsLog, match="would lose its rows"):
            transactions.abort(one)
        assert ids_in(sink) == []
        assert transactions.commit(one) == committables.Committed()
        assert ids_in(sink) == [10, 11]
        assert transactions.in_doubt() == ()
        again = transactions.find(one.transaction)
        assert again is not None
        assert not again.held
        assert transactions.commit(again) == committables.AlreadyCommitted()
    assert ids_in(sink) == [10, 11]


def test_undecided_rows_are_rolled_back_and_never_committed(log: AgedLog, sink: Sink) -> None:
    pre_commit(log, sink, 1, 1, 10, 11)
    log.claim()
    with transactions_of(log, sink) as transactions:
        (one,) = transactions.in_doubt()
        assert (one.status.decision, one.status.recovery_action) == (
            LoggedDecision.UNDECIDED,
            RecoveryAction.ABORT,
        )
        with pytest.raises(by_hand.ContradictsLog, match="would write its rows twice"):
            transactions.commit(one)
        assert ids_in(sink) == []
        assert transactions.abort(one) == committables.Aborted()
        assert transactions.in_doubt() == ()
        assert transactions.find(one.transaction) is None
    assert ids_in(sink) == []


def test_force_does_what_the_log_contradicts(log: AgedLog, sink: Sink) -> None:
    undecided = pre_commit(log, sink, 1, 2, 20)
    decided = pre_commit(log, sink, 1, 1, 10)
    log.decide(1, [decided])
    with transactions_of(log, sink) as transactions:
        found = {one.transaction: one for one in transactions.in_doubt()}
        assert transactions.force_commit(found[undecided.transaction]) == committables.Committed()
        assert transactions.force_abort(found[decided.transaction]) == committables.Aborted()
    assert ids_in(sink) == [20]


def test_what_was_rolled_back_behind_the_log_is_reported_lost(log: AgedLog, sink: Sink) -> None:
    decided = pre_commit(log, sink, 1, 1, 10)
    log.decide(1, [decided])
    with transactions_of(log, sink) as transactions:
        (one,) = transactions.in_doubt()
        transactions.force_abort(one)
        gone = transactions.find(decided.transaction)
        assert gone is not None
        assert not gone.held
        outcome = transactions.commit(gone)
        assert isinstance(outcome, committables.Lost)
    assert ids_in(sink) == []


@pytest.mark.parametrize("sign", ["the log is fresh", "its process is there"])
def test_nothing_is_settled_while_the_job_seems_to_run(log: AgedLog, sink: Sink, sign: str) -> None:
    decided = pre_commit(log, sink, 1, 1, 10)
    log.decide(1, [decided])
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        owner = f"{os.uname().nodename}:{process.pid}"
        fresh = sign == "the log is fresh"
        log.claim(owner="elsewhere:1" if fresh else owner, age_s=1 if fresh else HOUR_S)
        pre_commit(log, sink, 2, 2, 20)
        with transactions_of(log, sink) as transactions:
            decisions = [one.status.decision for one in transactions.in_doubt()]
            assert decisions == [LoggedDecision.DECIDED, LoggedDecision.PENDING]
            for one in transactions.in_doubt():
                for settle in (transactions.commit, transactions.abort):
                    with pytest.raises(by_hand.ContradictsLog, match="seems to be running"):
                        settle(one)
            assert ids_in(sink) == []
            # Once the sign is gone, both may be settled as the log says.
            log.age(HOUR_S)
            process.communicate(b"\n", timeout=30)
            for one in transactions.in_doubt():
                committing = one.transaction.attempt == 1
                (transactions.commit if committing else transactions.abort)(one)
    finally:
        process.kill()
        process.wait()
    assert ids_in(sink) == [10]


def test_a_job_that_has_finished_is_not_taken_for_running(log: AgedLog, sink: Sink) -> None:
    log.decide(1, [pre_commit(log, sink, 1, 1, 10)], age_s=1, final=True)
    with transactions_of(log, sink) as transactions:
        (one,) = transactions.in_doubt()
        assert transactions.commit(one) == committables.Committed()


def test_long_intervals_between_decisions_keep_a_quiet_log_alive(log: AgedLog, sink: Sink) -> None:
    """Ten minutes of silence say nothing of a job that decides every half hour."""
    log.decide(1, age_s=2400)
    log.decide(2, age_s=600)
    log.decide(3, age_s=590)  # a savepoint between two checkpoints, say
    pre_commit(log, sink, 1, 4, 30)
    with transactions_of(log, sink) as transactions:
        (one,) = transactions.in_doubt()
        assert one.status.decision is LoggedDecision.PENDING


def test_asking_whether_a_driver_lives_does_it_no_harm(log: AgedLog) -> None:
    """It goes by a signal, which must not be one that ends the driver."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        log.claim(owner=f"{socket.gethostname()}:{driver.pid}")
        (sign,) = by_hand.read_log(log.storage).liveness
        assert f"process {driver.pid} on this machine" in sign
        driver.stdin.write(b"still here\n")
        driver.stdin.flush()
        assert driver.stdout.readline() == b"still here\n"


def test_a_commit_by_hand_is_made_in_the_name_of_the_newest_attempt(
    log: AgedLog, tmp_path: Path
) -> None:
    """A target takes a commit of an older attempt for one of a job that was overtaken."""
    log.claim()
    assert by_hand.attempt_of(by_hand.read_log(log.storage)) == 2
    never_ran = AgedLog(tmp_path / "new")
    assert by_hand.attempt_of(by_hand.read_log(never_ran.storage)) == by_hand.attempt_of(None) == 1


def test_fencing_ends_the_attempt_that_could_still_decide(log: AgedLog, sink: Sink) -> None:
    living = AgedLog(log.root)
    living.claim(age_s=0)
    mine = pre_commit(log, sink, 2, 1, 10)
    with transactions_of(log, sink) as transactions:
        (one,) = transactions.in_doubt()
        assert one.status.decision is LoggedDecision.PENDING
        transactions.fence()
        (one,) = transactions.in_doubt()
        assert one.status.decision is LoggedDecision.UNDECIDED
        assert transactions.abort(one) == committables.Aborted()
    with pytest.raises(Fenced):
        living.decide(1, [mine])
    # A second helper finds nobody running, and the job starts as if nothing had been.
    with transactions_of(log, sink) as transactions:
        assert transactions.in_doubt() == ()
    assert log.claim() == 4


def test_the_age_is_that_of_the_rows(log: AgedLog, tmp_path: Path) -> None:
    sink = StagedSink(str(tmp_path / "rows.sqlite"))
    began = datetime.now(timezone.utc) - timedelta(seconds=2)
    pre_commit(log, sink, 1, 1, 10)
    with transactions_of(log, sink) as transactions:
        (one,) = transactions.in_doubt()
    assert one.kind is by_hand.InDoubtKind.STAGED
    assert one.prepared_at is not None
    assert began <= one.prepared_at <= datetime.now(timezone.utc) + timedelta(seconds=2)


@pytest.mark.parametrize("uid", ["out", "Übersicht der großen Zahlungen"])
def test_staged_rows_are_seen_without_their_sink_and_settled_only_with_it(
    tmp_path: Path, uid: str
) -> None:
    log = AgedLog(tmp_path / "checkpoints", sink_uid=uid)
    log.claim()
    sink_id = sink_id_of(log.job, uid)
    rows = log.storage.staging(sink_id).open()
    rows.write(pa.record_batch([pa.array([1, 2], pa.int64())], schema=SCHEMA))
    log.decide(1, [rows.seal(TransactionId(sink_id, 1, 1, 0))])
    with by_hand.InDoubtTransactions(
        [by_hand.StagedResourceManager(log.storage)], log.storage
    ) as transactions:
        (one,) = transactions.in_doubt()
        assert (one.status.decision, one.kind, one.rows) == (
            LoggedDecision.DECIDED,
            by_hand.InDoubtKind.STAGED,
            2,
        )
        for settle in (transactions.commit, transactions.force_abort):
            with pytest.raises(by_hand.SinkNeeded, match="--sink"):
                settle(one)
        assert len(transactions.in_doubt()) == 1


def test_staged_rows_of_a_sink_that_was_named_by_hand_are_the_jobs_own(
    log: AgedLog, tmp_path: Path
) -> None:
    """The log lists the transactions of this sink only while something of it is decided."""
    rows = log.storage.staging("by-hand").open()
    rows.write(pa.record_batch([pa.array([1], pa.int64())], schema=SCHEMA))
    rows.seal(TransactionId("by-hand", 1, 1, 0))
    sink = StagedSink(str(tmp_path / "rows.sqlite"))
    sink.open(CommitterContext("payments", "out", "by-hand", AttemptId(1)), SCHEMA)
    with by_hand.InDoubtTransactions(
        [by_hand.SinkResourceManager(sink, "by-hand")], log.storage
    ) as transactions:
        (one,) = transactions.in_doubt()
        assert one.status.decision is LoggedDecision.UNDECIDED
        assert transactions.abort(one) == committables.Aborted()


def test_looking_leaves_no_trace_of_a_job_that_never_ran(tmp_path: Path) -> None:
    log = AgedLog(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").mkdir()
    with by_hand.InDoubtTransactions(
        [by_hand.StagedResourceManager(log.storage)], log.storage
    ) as transactions:
        assert transactions.in_doubt() == ()
        with pytest.raises(ConfigError, match="no decision log"):
            transactions.fence()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_another_jobs_log_allows_nothing(log: AgedLog, sink: Sink) -> None:
    pre_commit(log, sink, 1, 1, 10)
    other = AgedLog(log.root, job="refunds")
    other.claim()
    other.decide(3)
    if isinstance(sink, StagedSink):
        return  # what another job has staged is not seen through this job's storage at all
    with transactions_of(other, sink) as transactions:
        (one,) = transactions.in_doubt()
        assert one.status.decision is LoggedDecision.FOREIGN
        for resolution in Resolution:
            assert transactions.refusal(resolution, one) is not None
