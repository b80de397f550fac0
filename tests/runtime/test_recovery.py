"""Exactly once on Spark through failures of functions, slots and drivers. Scenario S27 and more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.clusters import ON_BOTH, SLOWLY_ON_SPARK, AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS, assert_exactly_once, ledger, ledger_process

from onceflow import (
    Checkpointing,
    FixedDelay,
    HeapBackend,
    JobState,
    NoRestart,
    Pipeline,
    Record,
    RocksDBBackend,
    count,
    sum_,
)
from onceflow.core.errors import StateIncompatible, UserFunctionError
from onceflow.core.protocol.restart import RestartStrategy
from onceflow.core.state import StateBackend

BACKENDS = [
    pytest.param(HeapBackend(), id="heap", marks=pytest.mark.slow),
    pytest.param(RocksDBBackend(), id="rocksdb"),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bounded_input_is_written_whole_and_the_job_finishes(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    source = CountingSource(5_000)
    pipeline, sink = ledger(cluster, tmp_path, source, backend=backend)
    status = pipeline.run(60)
    assert status.state is JobState.FINISHED
    assert status.restores == 0
    assert_exactly_once(sink, source)


def test_without_periodic_checkpoints_the_final_one_commits_everything(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(2_000)
    pipeline, sink = ledger(cluster, tmp_path, source, interval=None)
    assert pipeline.run(60).checkpoints_completed == 1
    assert_exactly_once(sink, source)


@ON_BOTH
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.only_proof
def test_slots_killed_again_and_again_neither_lose_nor_double_a_row(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    source = CountingSource(12_000, pause_s=0.002, ends_with=str(tmp_path / "killed"))
    pipeline, sink = ledger(cluster, tmp_path, source, backend=backend)
    job = pipeline.start()
    for kill in range(3):
        job.wait_for(checkpoints=3 * (kill + 1))
        os.kill(job.status().slots[kill % 2].pid, signal.SIGKILL)
        deadline = time.monotonic() + 90
        while job.status().restores <= kill:
            assert time.monotonic() < deadline, job.status()
            time.sleep(0.01)
    (tmp_path / "killed").touch()
    status = job.wait(120)
    assert status.restores == 3
    assert_exactly_once(sink, source)


def test_a_function_that_fails_in_every_attempt_still_ends_with_each_record_once(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """S27: fails after some records of each attempt, restarted until done."""
    marks = tmp_path / "failures"
    marks.mkdir()
    source = CountingSource(200, splits_count=4, batch_rows=5, pause_s=0.03)

    def fail_sometimes(record: Record) -> Record:
        number = int(str(record["id"])) // 40
        mark = marks / str(number)
        if number and not mark.exists():
            mark.touch()
            raise ValueError(f"record {record['id']} fails once")
        return record

    pipeline, sink = _with_map(cluster, tmp_path, source, fail_sometimes)
    status = pipeline.run(60)
    assert len(list(marks.iterdir())) == 4
    # Two slots may fail in the same attempt.
    assert 2 <= status.restores <= 4
    assert_exactly_once(sink, source)


def test_a_function_that_always_fails_ends_the_job_with_its_own_error(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    def fail(record: Record) -> Record:
        raise ZeroDivisionError("no way")

    restart = FixedDelay(attempts=2, delay_s=0.0)
    pipeline, sink = _with_map(
        cluster, tmp_path, CountingSource(100), fail, restart=restart, interval=None
    )
    job = pipeline.start()
    with pytest.raises(UserFunctionError, match=r"check-amount.*ZeroDivisionError: no way") as told:
        job.wait(60)
    assert "(failure 3 in " in str(told.value)
    assert job.status().restores == 2
    assert sink.rows() == []


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 2)])
def test_a_stopped_job_goes_on_at_another_parallelism_with_every_record_once(
    cluster: AnyCluster, tmp_path: Path, before: int, after: int
) -> None:
    source = CountingSource(12_000, splits_count=3)
    pipeline, sink = ledger(cluster, tmp_path, source.held_in_the_middle(), parallelism=before)
    job = pipeline.start()
    job.wait_for(checkpoints=2, records=source.records // 2)
    assert job.stop(60).state is JobState.STOPPED
    assert len(sink.rows()) == source.records // 2
    assert sink.prepared() == []
    pipeline, sink = ledger(cluster, tmp_path, source, parallelism=after)
    assert pipeline.run(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


@SLOWLY_ON_SPARK
def test_a_cancelled_job_leaves_nothing_visible_that_is_not_decided_and_can_go_on(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(12_000)
    pipeline, sink = ledger(cluster, tmp_path, source.held_in_the_middle())
    job = pipeline.start()
    job.wait_for(checkpoints=2)
    assert job.cancel(60).state is JobState.CANCELLED
    assert len(sink.rows()) <= source.records // 2
    pipeline, sink = ledger(cluster, tmp_path, source)
    assert pipeline.run(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


def test_a_cancelled_job_whose_checkpoints_are_not_kept_settles_its_sinks_and_begins_anew(
    cluster: AnyCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in doubt, no state left; what was committed stays, and comes again by the restart."""
    monkeypatch.setenv(
        "ONCEFLOW_EXECUTION_CHECKPOINTING_EXTERNALIZED_CHECKPOINT_RETENTION",
        "DELETE_ON_CANCELLATION",
    )
    source = CountingSource(12_000, pause_s=0.002, ends_with=str(tmp_path / "read all"))
    pipeline, sink = ledger(cluster, tmp_path, source, inline_threshold_bytes=100)
    job = pipeline.start()
    job.wait_for(checkpoints=2)
    status = job.cancel(60)
    assert (status.state, status.last_error) == (JobState.CANCELLED, "")
    committed = sink.rows()
    assert committed
    assert sink.prepared() == []
    home = tmp_path / "checkpoints" / "ledger"
    assert not list(home.glob("chk-*")), "no state"
    assert (home / "log").is_dir(), "what was committed is known for ever"
    (tmp_path / "read all").touch()
    pipeline, sink = ledger(cluster, tmp_path, source)
    assert pipeline.run(60).state is JobState.FINISHED
    again = list(sink.rows())
    for row in committed:
        again.remove(row)
    balance = [row["n"] for row in again if row["account"] == again[0]["account"]]
    assert len(again) == source.records, "every record once more, and none twice"
    assert min(balance) == 1, "the state begins anew, too"


def test_a_finished_job_started_again_finishes_at_once_and_doubles_nothing(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(1_000)
    ledger(cluster, tmp_path, source)[0].run(60)
    pipeline, sink = ledger(cluster, tmp_path, source)
    assert pipeline.run(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


def test_another_number_of_key_groups_is_refused_by_name(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(500)
    ledger(cluster, tmp_path, source, max_parallelism=64)[0].run(60)
    pipeline, _ = ledger(cluster, tmp_path, source, max_parallelism=128)
    with pytest.raises(StateIncompatible, match="max_parallelism=64"):
        pipeline.run(60)


def test_a_failure_without_restart_ends_the_job(cluster: AnyCluster, tmp_path: Path) -> None:
    source = CountingSource(12_000)
    pipeline, sink = ledger(cluster, tmp_path, source.held_in_the_middle(), restart=NoRestart())
    job = pipeline.start()
    job.wait_for(checkpoints=2)
    os.kill(job.status().slots[0].pid, signal.SIGKILL)
    with pytest.raises(Exception, match="slot 0 is lost"):
        job.wait(60)
    assert job.state is JobState.FAILED
    pipeline, sink = ledger(cluster, tmp_path, source)
    pipeline.run(60)
    assert_exactly_once(sink, source)


@SLOWLY_ON_SPARK
def test_a_driver_killed_with_sigkill_is_followed_by_another_process_that_goes_on(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(40_000)
    out = tmp_path / "out" / "committed"
    # At this pace the process needs 40 s to read all, and is killed long before.
    with ledger_process(cluster, tmp_path, replace(source, pause_s=0.1)) as first:
        first.wait_until(lambda: out.exists() and len(list(out.iterdir())) >= 6)
    pipeline, sink = ledger(cluster, tmp_path, source)
    status = pipeline.run(60)
    assert status.attempt == 2
    assert status.attempts[0].restored_checkpoint > 0
    assert_exactly_once(sink, source)


def _with_map(
    cluster: AnyCluster,
    tmp_path: Path,
    source: CountingSource,
    function: Callable[[Record], Record],
    restart: RestartStrategy | None = None,
    interval: float | None = 0.05,
) -> tuple[Pipeline, DirectorySink]:
    """Return `ledger`, with `function` mapped over the records first."""
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = Pipeline(
        cluster,
        name="ledger",
        parallelism=4,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=interval),
        restart=restart or FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )
    records = pipeline.read(source, uid="records").map(function, uid="check-amount")
    balances = records.key_by("account").running(balance=sum_("amount"), n=count(), uid="balance")
    balances.write(sink, uid="ledger")
    return pipeline, sink
