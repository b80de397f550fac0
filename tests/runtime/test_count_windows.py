"""Windows of a number of records in whole jobs: once, and with the last ones at the end."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from tests.runtime.test_recovery import BACKENDS
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource, amount_of
from tests.support.directory_sink import DirectorySink
from tests.support.held_up import await_checkpoint
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    FixedDelay,
    JobState,
    Pipeline,
    StateBackend,
    WatermarkStrategy,
    count,
    sum_,
)
from onceflow.core.errors import ConfigError, StateIncompatible


def pipeline_of(
    cluster: AnyCluster,
    directory: Path,
    source: CountingSource,
    size: int,
    backend: StateBackend | None = None,
    watermarks: WatermarkStrategy | None = None,
) -> tuple[Pipeline, DirectorySink]:
    sink = DirectorySink(str(directory / "out"))
    pipeline = Pipeline(
        cluster,
        name="counts",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        state_backend=backend,
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )
    records = pipeline.read(source, uid="records", watermarks=watermarks)
    windows = records.key_by("account").count_window(size)
    even = count(where="amount % 2 = 0")
    counts = windows.aggregate(total=sum_("amount"), n=count(), even=even, uid="counts")
    counts.write(sink, uid="out")
    return pipeline, sink


def assert_windows(sink: DirectorySink, source: CountingSource, size: int) -> None:
    totals, sizes = Counter[str](), defaultdict[str, list[int]](list)
    even = 0
    for row in sink.rows():
        totals[row["account"]] += row["total"]
        even += row["even"]
        sizes[row["account"]].append(row["n"])
    expected, numbers = Counter[str](), Counter[str]()
    for record in range(source.records):
        expected[str(record % source.accounts)] += amount_of(record)
        numbers[str(record % source.accounts)] += 1
    assert totals == expected
    assert even == sum(amount_of(record) % 2 == 0 for record in range(source.records))
    for account, number in numbers.items():
        left = [number % size] if number % size else []
        assert sorted(sizes[account]) == sorted([size] * (number // size) + left)


@pytest.mark.parametrize("backend", BACKENDS, ids=["heap", "rocksdb"])
@pytest.mark.parametrize("watermarks", [None, WatermarkStrategy("id")], ids=["", "watermarks"])
def test_every_record_is_in_one_window_and_only_the_last_of_a_key_is_not_full(
    cluster: AnyCluster,
    tmp_path: Path,
    backend: StateBackend,
    watermarks: WatermarkStrategy | None,
) -> None:
    source = CountingSource(1_000, splits_count=2)
    pipeline, sink = pipeline_of(cluster, tmp_path, source, 7, backend, watermarks)
    pipeline.start().wait(60)
    assert_windows(sink, source, 7)


@pytest.mark.parametrize("backend", BACKENDS, ids=["heap", "rocksdb"])
def test_a_killed_slot_neither_loses_nor_repeats_a_record_of_a_window(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    source = CountingSource(4_000, pause_s=0.002, ends_with=str(tmp_path / "ends"))
    pipeline, sink = pipeline_of(cluster, tmp_path, source, 7, backend)
    job = pipeline.start()
    for _ in range(2):
        job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
        os.kill(job.status().slots[0].pid, signal.SIGKILL)
    job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
    (tmp_path / "ends").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert len(job.status().attempts) >= 2
    assert_windows(sink, source, 7)


def test_another_size_is_refused_while_windows_are_open(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(1_000, pause_s=0.01, endless=True)
    pipeline, _ = pipeline_of(cluster, tmp_path, source, 1_000_000)
    job = pipeline.start()
    await_checkpoint(job)
    assert job.stop(60).state is JobState.STOPPED
    again, _ = pipeline_of(cluster, tmp_path, source, 999)
    with pytest.raises(StateIncompatible, match="size was 1000000 records and is now 999 records"):
        again.start().wait(60)


@pytest.mark.parametrize(
    ("size", "error"),
    [(0, "a window has 1 record or more"), (2**63, "at most 9223372036854775807")],
)
def test_a_window_of_no_record_or_of_more_than_can_be_counted_is_refused(
    cluster: AnyCluster, tmp_path: Path, size: int, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        pipeline_of(cluster, tmp_path, CountingSource(1), size)


def test_a_window_of_the_largest_size_is_emitted_at_the_end(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(100, splits_count=2)
    pipeline, sink = pipeline_of(cluster, tmp_path, source, 2**63 - 1)
    pipeline.start().wait(60)
    assert_windows(sink, source, 2**63 - 1)
