"""Functions of Spark's mapInArrow and mapInPandas in a job: nothing lost or doubled at barriers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.clusters import SLOWLY_ON_SPARK, AnyCluster
from tests.support.counting_source import SCHEMA, CountingSource, amount_of
from tests.support.directory_sink import DirectorySink

from onceflow import Checkpointing, FixedDelay, NoRestart, Pipeline, Stream, count
from onceflow.core.errors import UserFunctionError

_HELD_ROWS = 333


def rebatched(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Hold rows back until there are many, and give the rest when there are no more."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(one.num_rows for one in held) >= _HELD_ROWS:
            yield pa.concat_batches(held)
            held = []
    if held:
        yield pa.concat_batches(held)


def doubled_in_pandas(frames: Any) -> Any:
    """Hold every DataFrame back until the next one has come."""
    last = None
    for frame in frames:
        if last is not None:
            yield last
        last = frame.drop(columns="n").assign(amount=frame["amount"] * 2)
    if last is not None:
        yield last


def begin(
    cluster: AnyCluster, directory: Path, source: CountingSource, **settings: Any
) -> tuple[Pipeline, Stream, DirectorySink]:
    pipeline = Pipeline(
        cluster,
        name="iterators",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        restart=settings.get("restart", FixedDelay(attempts=20, delay_s=0.01)),
    )
    records = pipeline.read(source, uid="records")
    return pipeline, records, DirectorySink(str(directory / "out"))


@SLOWLY_ON_SPARK
def test_functions_that_hold_rows_back_lose_and_double_none_while_slots_are_killed(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(20_000, pause_s=0.002, ends_with=str(tmp_path / "killed"))
    pipeline, records, sink = begin(cluster, tmp_path, source)
    arrow = records.map_batches(rebatched, uid="arrow")
    pandas = (
        arrow.key_by("account")
        .running(n=count(), uid="n")
        .map_pandas(doubled_in_pandas, "id bigint, account string, amount bigint", uid="pandas")
    )
    pandas.write(sink, uid="out")
    job = pipeline.start()
    for kill in range(2):
        job.wait_for(checkpoints=2 * (kill + 1))
        os.kill(job.status().slots[kill].pid, signal.SIGKILL)
    (tmp_path / "killed").touch()
    assert job.wait(60).restores >= 1
    rows = sorted((row["id"], row["amount"]) for row in sink.rows())
    assert rows == [(one, 2 * amount_of(one)) for one in range(source.records)]


def test_a_call_ends_at_each_barrier_and_a_function_that_stops_early_is_refused(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    def first_only(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield next(batches)

    pipeline, records, sink = begin(
        cluster, tmp_path, CountingSource(5_000, pause_s=0.001), restart=NoRestart()
    )
    records.map_batches(first_only, uid="first").write(sink, uid="out")
    with pytest.raises(UserFunctionError, match=r"'first' returned before it had read every"):
        pipeline.run(60)


def test_what_a_function_of_iterators_raises_names_operator_and_line(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    def fails(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if 77 in batch["id"].to_pylist():
                raise ZeroDivisionError("no such id")
            yield batch

    pipeline, records, sink = begin(cluster, tmp_path, CountingSource(500), restart=NoRestart())
    records.map_batches(fails, schema=SCHEMA, uid="fails").write(sink, uid="out")
    with pytest.raises(UserFunctionError) as raised:
        pipeline.run(60)
    text = str(raised.value)
    assert "operator 'fails' failed: ZeroDivisionError: no such id; at " in text
    assert "test_batch_iterators.py" in text
    assert "call_user" not in text
