"""A source with several outputs: each row once in its own sink, whatever is killed or changed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS
from tests.support.two_outputs import EVERY, TwoOutputs
from tests.support.waiting import await_true

from onceflow import (
    Checkpointing,
    FixedDelay,
    Job,
    JobState,
    LocalProcesses,
    Pipeline,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    count,
)

SOURCE = TwoOutputs(transactions=1_000, pause_s=0.005)


def _pipeline(
    directory: Path,
    source: TwoOutputs,
    outputs: Sequence[str],
    *,
    unaligned: bool = False,
    retired: Mapping[str, DirectorySink] | None = None,
) -> tuple[Pipeline, Mapping[str, DirectorySink]]:
    """Build a job that writes each of `outputs` to a sink of its own, the orders by key."""
    pipeline = Pipeline(
        LocalProcesses(),
        name="shop",
        parallelism=2,
        checkpointing=Checkpointing(
            storage=str(directory / "checkpoints"), interval=0.1, unaligned=unaligned
        ),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
        retired_sinks=retired,
    )
    sinks = {name: DirectorySink(str(directory / name)) for name in outputs}
    letters = DirectorySink(str(directory / "letters")) if source.has_dead_letters else None
    streams = pipeline.read_outputs(source, uid="shop", dead_letters=letters)
    for name, sink in sinks.items():
        stream = streams[name]
        if name == "orders":
            # An exchange by key: the rows of an output leave the slot, and barriers overtake them.
            stream = stream.key_by("amount").running(n=count(), uid="totals")
        stream.write(sink, uid=name)
    return pipeline, sinks if letters is None else {**sinks, "letters": letters}


def _has_restored(job: Job, kills: int) -> bool:
    return job.status().restores > kills


def _expect_once(source: TwoOutputs, sinks: Mapping[str, DirectorySink]) -> None:
    if orders := sinks.get("orders"):
        rows = Counter((row["id"], row["amount"]) for row in orders.rows())
        assert rows == Counter(source.list_orders())
        assert orders.prepared() == []
    if customers := sinks.get("customers"):
        assert Counter(row["name"] for row in customers.rows()) == Counter(source.list_customers())
        assert customers.prepared() == []
    if letters := sinks.get("letters"):
        assert Counter(row["offset"] for row in letters.rows()) == Counter(source.list_bad())
        assert letters.prepared() == []


@pytest.mark.parametrize("unaligned", [False, True])
def test_rows_and_dead_letters_of_each_output_are_there_once_though_slots_are_killed(
    tmp_path: Path, unaligned: bool
) -> None:
    killed = str(tmp_path / "killed")
    source = replace(SOURCE, waits_at=900, goes_on_with=killed, has_dead_letters=True)
    pipeline, sinks = _pipeline(tmp_path, source, ["orders", "customers"], unaligned=unaligned)
    job = pipeline.start()
    for kill in range(2):
        job.wait_for(checkpoints=2 * (kill + 1))
        os.kill(job.status().slots[kill].pid, signal.SIGKILL)
        await_true(partial(_has_restored, job, kill))
    (tmp_path / "killed").touch()
    assert job.wait(120).state is JobState.FINISHED
    _expect_once(source, sinks)


def test_a_job_goes_on_with_an_output_more_and_with_one_less(tmp_path: Path) -> None:
    before = replace(SOURCE, names=("orders",), waits_at=200)
    pipeline, sinks = _pipeline(tmp_path, before, ["orders"])
    job = pipeline.start()
    job.wait_for(records=400)
    assert job.stop(60).state is JobState.STOPPED
    assert len(sinks["orders"].rows()) == 400

    # The source and the job have an output more. Its rows begin at the job's position.
    pipeline, sinks = _pipeline(tmp_path, replace(SOURCE, waits_at=600), ["orders", "customers"])
    job = pipeline.start()
    job.wait_for(records=1_000)
    assert job.stop(60).state is JobState.STOPPED
    assert len(sinks["orders"].rows()) == 1_200
    named = Counter(row["name"] for row in sinks["customers"].rows())
    assert named == Counter(f"customer {number}" for number in range(400, 1_200, EVERY))

    # The job uses an output less: its rows are read and dropped.
    retired = {"shop.customers": DirectorySink(str(tmp_path / "customers"))}
    pipeline, sinks = _pipeline(tmp_path, SOURCE, ["orders"], retired=retired)
    assert pipeline.run(120).state is JobState.FINISHED
    _expect_once(SOURCE, sinks)


def test_windows_lose_no_row_to_the_watermarks_of_several_outputs(tmp_path: Path) -> None:
    source = TwoOutputs(transactions=200)
    pipeline = Pipeline(
        LocalProcesses(),
        name="windows",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
        settings=SETTINGS,
    )
    streams = pipeline.read_outputs(
        source,
        uid="shop",
        watermarks={"orders": WatermarkStrategy("at"), "customers": WatermarkStrategy("at")},
    )
    sink = DirectorySink(str(tmp_path / "counts"))
    windows = streams["orders"].key_by("amount").window(TumblingEventTimeWindows("100 ms"))
    windows.aggregate(n=count(), uid="counts").write(sink, uid="out")
    assert pipeline.run(60).state is JobState.FINISHED
    assert sum(row["n"] for row in sink.rows()) == len(source.list_orders())
