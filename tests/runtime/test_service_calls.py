"""Calls to a service in another process: each result once, whatever happens to slots."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.runtime.test_union import begin
from tests.support.clusters import AnyCluster
from tests.support.counting_service import counting_service
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.held_up import await_checkpoint, kill_a_slot, killed_and_rescaled
from tests.support.job_process import JobProcess
from tests.support.scripted_sink import ScriptedSink, throttled_sink
from tests.support.service_job_process import DOUBLED, RECORDS, Ask
from tests.support.waiting import await_status

from onceflow import (
    DEAD_LETTERS,
    CallRetries,
    JobState,
    Pipeline,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    count,
)
from onceflow.core.api.pipeline import Job
from onceflow.core.errors import ConfigError, StateIncompatible, UserFunctionError

SOURCE = CountingSource(1_200, splits_count=3, batch_rows=20)
CAPACITY = 8


@pytest.mark.parametrize(
    ("unaligned", "ordered"),
    [
        pytest.param(False, True, id="aligned-ordered"),
        pytest.param(True, False, id="unaligned-unordered", marks=pytest.mark.servers),
    ],
)
@pytest.mark.only_proof
def test_each_result_comes_once_and_each_call_has_the_key_of_its_record(
    cluster: AnyCluster, tmp_path: Path, unaligned: bool, ordered: bool
) -> None:
    with counting_service() as service:

        def make(parallelism: int) -> tuple[Pipeline, ScriptedSink]:
            pipeline = begin(cluster, tmp_path, parallelism=parallelism, unaligned=unaligned)
            ends = "" if unaligned else str(tmp_path / "out" / "released")
            records = pipeline.read(replace(SOURCE, ends_with=ends), uid="records")
            asked = records.async_map(
                Ask(service),
                schema=DOUBLED,
                capacity=CAPACITY,
                ordered=ordered,
                retry=CallRetries(tries=3),
                idempotency_key="id",
                uid="asked",
            )
            sink = throttled_sink(tmp_path / "out", pause_s=0.1 if unaligned else 0)
            asked.key_by("account").running(n=count(), uid="counted").write(sink, uid="out")
            return pipeline, sink

        rows = killed_and_rescaled(make, unaligned=unaligned)
        counts, running_max = service.counts()
    assert Counter(row["id"] for row in rows) == Counter(range(SOURCE.records))
    assert all(row["doubled"] == 2 * row["id"] for row in rows)
    numbers = Counter((row["account"], row["n"]) for row in rows)
    assert set(numbers.values()) == {1}
    assert sorted(map(int, counts)) == list(range(SOURCE.records))
    assert {len(keys) for keys in counts.values()} == {1}, "one key a record"
    assert len({key for keys in counts.values() for key in keys}) == SOURCE.records
    # The threads of killed slots may still be served.
    assert 1 < running_max <= 2 * 3 * CAPACITY


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="ordered", marks=pytest.mark.servers),
        pytest.param(("--unordered", "--unaligned"), id="unaligned", marks=pytest.mark.servers),
        pytest.param(("--unordered",), id="unordered", marks=pytest.mark.slow),
        pytest.param(("--unaligned",), id="unaligned-ordered", marks=pytest.mark.slow),
    ],
)
def test_each_result_comes_once_though_the_whole_job_is_killed_and_rescaled(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    module = "tests.support.service_job_process"
    with counting_service() as service:
        for parallelism in (2, 3, 1):
            arguments = ("--url", service.url, "--parallelism", str(parallelism), *flags)
            with JobProcess(tmp_path, module, *arguments) as job:
                try:
                    job.await_checkpoints(2)
                finally:
                    job.kill_tree()
        with JobProcess(tmp_path, module, *arguments) as job:
            job.finish()
        counts, _ = service.counts()
    rows = DirectorySink(str(tmp_path / "out")).rows()
    assert Counter(row["id"] for row in rows) == Counter(range(RECORDS))
    assert all(row["doubled"] == 2 * row["id"] for row in rows)
    numbers = Counter((row["account"], row["n"]) for row in rows)
    assert set(numbers.values()) == {1}
    assert {len(keys) for keys in counts.values()} == {1}, "one key a record"
    assert max(calls for keys in counts.values() for calls in keys.values()) > 1


def test_no_record_is_late_behind_calls_that_end_out_of_order(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """A record's time is its id, and the records of a window are answered in any order."""

    async def wait(record: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(record["id"] % 7 / 500)
        return record

    ends = str(tmp_path / "killed")
    source = replace(SOURCE, pause_s=0.01, ends_with=ends)
    pipeline, sink = begin(cluster, tmp_path), DirectorySink(str(tmp_path / "out"))
    records = pipeline.read(source, uid="records", watermarks=WatermarkStrategy("id"))
    asked = records.async_map(wait, ordered=False, uid="asked")
    windows = asked.key_by("account").window(TumblingEventTimeWindows(0.1))
    windows.aggregate(n=count(), uid="windows").write(sink, uid="out")
    job = pipeline.start()
    await_checkpoint(job)
    kill_a_slot(job, 0)
    Path(ends).touch()
    assert job.wait(60).state is JobState.FINISHED
    keys = Counter((row["account"], row["window_start"]) for row in sink.rows())
    assert set(keys.values()) == {1}
    assert sum(row["n"] for row in sink.rows()) == SOURCE.records


@pytest.mark.parametrize("ordered", [True, pytest.param(False, marks=pytest.mark.servers)])
def test_checkpoints_do_not_wait_for_calls(
    cluster: AnyCluster, tmp_path: Path, ordered: bool
) -> None:
    gate, sink = tmp_path / "gate", DirectorySink(str(tmp_path / "out"))

    async def answer(record: dict[str, Any]) -> dict[str, Any]:
        while not gate.exists():
            await asyncio.sleep(0.01)
        return record

    pipeline = begin(cluster, tmp_path, restart=False, timeout=2.0)
    records = pipeline.read(replace(SOURCE, batch_rows=5), uid="records")
    asked = records.async_map(answer, capacity=2, ordered=ordered, uid="asked")
    asked.write(sink, uid="out")
    job = pipeline.start()
    status = await_status(job, lambda status: len(status.history) >= 8)
    # The rows that barriers push through do not become more with each checkpoint.
    sizes = [checkpoint.size_bytes for checkpoint in status.history]
    assert max(sizes[4:]) <= max(sizes[:4])
    gate.touch()
    assert job.wait(60).state is JobState.FINISHED
    ids = Counter(row["id"] for row in sink.rows())
    assert ids == Counter(range(SOURCE.records))


@pytest.mark.servers
def test_the_last_calls_may_take_longer_than_a_checkpoint(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    async def answer(record: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.4)
        return record

    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = begin(cluster, tmp_path, restart=False, timeout=2.0)
    records = pipeline.read(replace(SOURCE, records=36), uid="records")
    asked = records.async_map(answer, capacity=2, uid="asked")
    asked.key_by("account").running(n=count(), uid="counted").write(sink, uid="out")
    status = pipeline.run(60)
    assert status.state is JobState.FINISHED
    assert sum(checkpoint.kind == "final" for checkpoint in status.history) > 1
    assert Counter(row["id"] for row in sink.rows()) == Counter(range(36))


def test_records_whose_calls_fail_are_dead_letters_or_end_the_job(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    async def refuse(record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == 7:
            raise ValueError("the service knows no 7")
        return record

    source = replace(SOURCE, records=30)
    letters, sink = (DirectorySink(str(tmp_path / name)) for name in ("letters", "out"))
    pipeline = begin(cluster, tmp_path / "left out", restart=False)
    records = pipeline.read(source, uid="records")
    records.async_map(refuse, dead_letters=letters, uid="asked").write(sink, uid="out")
    assert pipeline.run(60).state is JobState.FINISHED
    assert sorted(row["id"] for row in sink.rows()) == [n for n in range(30) if n != 7]
    (letter,) = letters.rows()
    assert set(letter) == set(DEAD_LETTERS.names)
    assert (letter["operator"], letter["reason"]) == ("asked", "ValueError: the service knows no 7")
    pipeline = begin(cluster, tmp_path / "ends", restart=False)
    asked = pipeline.read(source, uid="records").async_map(refuse, uid="asked")
    asked.write(DirectorySink(str(tmp_path / "never")), uid="out")
    with pytest.raises(UserFunctionError, match=r"'asked' failed: ValueError: .*no 7.*'id': 7"):
        pipeline.run(60)


@pytest.mark.servers
def test_other_columns_are_refused_until_a_drain_has_ended_all_calls(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    gate, sink = tmp_path / "gate", DirectorySink(str(tmp_path / "out"))

    async def answer(record: dict[str, Any]) -> dict[str, Any]:
        while not gate.exists():
            await asyncio.sleep(0.01)
        return {"id": record["id"]}

    def start(*columns: str) -> Job:
        pipeline = begin(cluster, tmp_path)
        source = CountingSource(40, endless=True, pause_s=0.05)
        records = pipeline.read(source, uid="records").project(*columns)
        asked = records.async_map(
            answer, schema=pa.schema([("id", pa.int64())]), capacity=1_000, uid="asked"
        )
        asked.write(sink, uid="out")
        return pipeline.start()

    job = start("id", "account")
    await_checkpoint(job)
    job.stop(savepoint=True)
    with pytest.raises(StateIncompatible, match=r"of operator 'asked' with columns id int64, acc"):
        start("id", "amount").wait(60)
    # The advice, followed: each record is written once.
    job = start("id", "account")
    await_checkpoint(job)
    gate.touch()
    job.stop(savepoint=True, drain=True)
    written = len(sink.rows())
    job = start("id", "amount")
    await_status(job, lambda _: len(sink.rows()) > written)
    job.stop()
    for split in range(2):
        ids = sorted(row["id"] for row in sink.rows() if row["id"] % 2 == split)
        assert ids == [2 * number + split for number in range(len(ids))]


def test_what_is_no_call_is_refused_by_name(cluster: AnyCluster, tmp_path: Path) -> None:
    stream: Any = begin(cluster, tmp_path).read(SOURCE, uid="records")

    async def call(record: dict[str, Any]) -> dict[str, Any]:
        return record

    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"function": dict}, r"takes a coroutine function .* was given dict"),
        ({"capacity": 0}, r"capacity=0\): give 1 to"),
        ({"timeout": 0}, "timeout=0"),
        ({"rate_limit": -1.0}, "rate_limit=-1.0"),
        ({"idempotency_key": "no"}, "idempotency_key='no'.*no such column"),
        ({"on_bad_row": "dead_letter"}, "needs dead_letters"),
    ]
    for arguments, message in mistakes:
        with pytest.raises(ConfigError, match=message):
            stream.async_map(arguments.pop("function", call), uid="asked", **arguments)
    with pytest.raises(ConfigError, match="rows_max=0"):
        stream.async_map_batches(call, rows_max=0, uid="asked")
    with pytest.raises(ConfigError, match="tries=0"):
        CallRetries(tries=0)
