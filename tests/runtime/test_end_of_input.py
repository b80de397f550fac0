"""Tests that rows of `on_end` are committed once, whatever is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS
from tests.support.scripted_sink import ScriptedSink, Wait, released_in
from tests.support.waiting import await_true

from onceflow import (
    BatchStates,
    BroadcastProcessFunction,
    Checkpointing,
    CoProcessFunction,
    FixedDelay,
    HeapBackend,
    JobEvent,
    JobState,
    JobStatus,
    KeyedBatch,
    KeyedBatchFunction,
    KeyedFunction,
    ListStateDescriptor,
    LocalProcesses,
    MapStateDescriptor,
    NoRestart,
    OperatorAccess,
    Pipeline,
    ProcessFunction,
    Record,
    RocksDBBackend,
    StateAccess,
    StateBackend,
    Stream,
)
from onceflow.core.api.pipeline import Job
from onceflow.core.protocol.checkpoints.decisions import SavepointRequest
from onceflow.core.runtime.driver.savepoints import Savepoints
from onceflow.core.runtime.events.job_events import CheckpointTriggered
from onceflow.core.spi import EndOfInput, PolledRows, ReaderContext, SourceReader, Split

KEPT: ListStateDescriptor[int] = ListStateDescriptor("kept", int)
RULES: MapStateDescriptor[int, int] = MapStateDescriptor("rules", int, int)
IDS = pa.schema([("id", pa.int64())])


class _Kept:
    """Keeps ids in the state of the subtask, and emits them when the input has ended."""

    def open(self, state: StateAccess | OperatorAccess) -> None:
        operator = getattr(state, "operator", state)
        self._kept = operator.list_state(KEPT)

    def keep(self, record: Record) -> None:
        self._kept.add(record["id"])

    def on_end(self) -> Iterable[Record]:
        for kept in list(self._kept.get()):
            yield {"id": kept}
        self._kept.clear()


class OfRecords(_Kept, ProcessFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return IDS

    def process(self, record: Record) -> None:
        self.keep(record)


class OfKeys(_Kept, KeyedFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return IDS

    def process(self, record: Record) -> None:
        self.keep(record)


class OfTwo(_Kept, CoProcessFunction):
    def output_schema(self, first: pa.Schema, second: pa.Schema) -> pa.Schema:
        return IDS

    def process_1(self, record: Record) -> None:
        self.keep(record)

    def process_2(self, record: Record) -> None:
        self.keep(record)


class OfBroadcast(_Kept, BroadcastProcessFunction):
    def output_schema(self, records: pa.Schema, broadcast: pa.Schema) -> pa.Schema:
        return IDS

    def process(self, record: Record) -> None:
        self.keep(record)

    def process_broadcast(self, record: Record) -> None:
        pass


class OfBatches(KeyedBatchFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return IDS

    def open(self, state: BatchStates) -> None:
        self._kept = state.operator.list_state(KEPT)

    def process(self, batch: KeyedBatch) -> None:
        for record_id in batch.rows.column("id").to_pylist():
            self._kept.add(record_id)

    def on_end(self) -> pa.RecordBatch:
        ids = list(self._kept.get())
        self._kept.clear()
        return pa.record_batch([pa.array(ids, pa.int64())], schema=IDS)


def of_records(records: Stream) -> Stream:
    return records.process(OfRecords(), uid="work")


def of_keys(records: Stream) -> Stream:
    return records.key_by("account").process(OfKeys(), uid="work")


def of_batches(records: Stream) -> Stream:
    return records.key_by("account").process_batches(OfBatches(), uid="work")


def of_two(records: Stream) -> Stream:
    even = records.filter(lambda record: record["id"] % 2 == 0)
    odd = records.filter(lambda record: record["id"] % 2 == 1)
    return even.key_by("account").connect(odd.key_by("account")).process(OfTwo(), uid="work")


def of_broadcast(records: Stream) -> Stream:
    none = records.filter(lambda record: False)
    return (
        records.key_by("account").connect(none.broadcast(RULES)).process(OfBroadcast(), uid="work")
    )


KINDS = [of_records, of_keys, of_batches, of_two, of_broadcast]
BACKENDS = [HeapBackend(), pytest.param(RocksDBBackend(), marks=pytest.mark.slow)]


def _pipeline(
    directory: Path,
    source: CountingSource,
    work: Callable[[Stream], Stream],
    backend: StateBackend,
    *,
    unaligned: bool = False,
) -> tuple[Pipeline, DirectorySink]:
    sink = DirectorySink(str(directory / "out"))
    pipeline = Pipeline(
        LocalProcesses(),
        name="ends",
        parallelism=2,
        checkpointing=Checkpointing(
            storage=str(directory / "checkpoints"), interval=0.1, unaligned=unaligned
        ),
        state_backend=backend,
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=replace(SETTINGS, heartbeat_interval_s=0.1),
    )
    work(pipeline.read(source, uid="records")).write(sink, uid="out")
    return pipeline, sink


class _KillsAt:
    """Kills a slot as soon as the first checkpoint of a kind is triggered."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.killed = threading.Event()

    def __call__(self, event: JobEvent, status: JobStatus) -> None:
        triggered = isinstance(event, CheckpointTriggered) and event.kind.value == self._kind
        if triggered and not self.killed.is_set():
            self.killed.set()
            os.kill(status.slots[0].pid, signal.SIGKILL)


def _ids(sink: DirectorySink) -> list[int]:
    return sorted(row["id"] for row in sink.rows())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("work", KINDS)
def test_what_functions_make_at_the_end_is_there_once_through_a_kill_at_the_end(
    tmp_path: Path, work: Callable[[Stream], Stream], backend: StateBackend
) -> None:
    """The first attempt loses a slot when functions have been told, or are about to be."""
    source = CountingSource(200)
    pipeline, sink = _pipeline(tmp_path, source, work, backend)
    job = pipeline.start()
    kills = _KillsAt("end")
    job.add_listener(kills)
    assert job.wait(60).state is JobState.FINISHED
    assert kills.killed.is_set()
    assert _ids(sink) == list(range(200))
    assert sink.prepared() == []


@pytest.mark.parametrize("unaligned", [False, True])
def test_a_job_that_is_started_again_at_its_end_makes_nothing_twice(
    tmp_path: Path, unaligned: bool
) -> None:
    """The function emits one row a subtask whatever its state is; more input is another end."""
    source = CountingSource(200)
    pipeline, sink = _pipeline(tmp_path, source, always, HeapBackend(), unaligned=unaligned)
    for _ in range(3):
        assert pipeline.start().wait(60).state is JobState.FINISHED
        assert _ids(sink) == [0, 1]
    more, _ = _pipeline(tmp_path, CountingSource(300), always, HeapBackend(), unaligned=unaligned)
    assert more.start().wait(60).state is JobState.FINISHED
    assert _ids(sink) == [0, 0, 1, 1]


class AlwaysOne(ProcessFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return IDS

    def open(self, state: OperatorAccess) -> None:
        self._subtask = state.subtask

    def process(self, record: Record) -> None:
        pass

    def on_end(self) -> Record:
        return {"id": self._subtask}


def always(records: Stream) -> Stream:
    return records.process(AlwaysOne(), uid="work")


class TellsItsEnd(AlwaysOne):
    """Leaves a file when it makes its row."""

    def __init__(self, told: str) -> None:
        self._told = Path(told)

    def on_end(self) -> Record:
        self._told.touch()
        return super().on_end()


def _wait_at_the_end(out: Path, *_: object) -> None:
    """Wait only once the functions have made their last rows."""
    if (out / "ended").exists():
        Wait(released_in(out))()


def test_rows_of_the_end_are_there_once_though_their_checkpoint_times_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    sink = ScriptedSink(str(out), {"pre_commit": partial(_wait_at_the_end, out)})
    pipeline = Pipeline(
        LocalProcesses(),
        name="ends",
        parallelism=2,
        checkpointing=Checkpointing(
            storage=str(tmp_path / "checkpoints"), interval=0.1, timeout=1.0, tolerable_failures=99
        ),
        restart=NoRestart(),
        settings=SETTINGS,
    )
    told = TellsItsEnd(str(out / "ended"))
    pipeline.read(CountingSource(200), uid="records").process(told, uid="work").write(
        sink, uid="out"
    )
    job = pipeline.start()
    await_true(lambda: job.status().checkpoints_failed > 0)
    sink.release()
    assert job.wait(60).state is JobState.FINISHED
    assert _ids(sink) == [0, 1]


def _await_read(job: Job, records: int) -> None:
    deadline = time.monotonic() + 90
    while job.status().records_in < records:
        assert time.monotonic() < deadline, job.status()
        time.sleep(0.01)


class HeldAtOne(KeyedFunction):
    """Holds the first checkpoint up until a file is there, and makes a row at the end."""

    def __init__(self, held_until: str) -> None:
        self._held_until = Path(held_until)

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return IDS

    def open(self, state: StateAccess) -> None:
        self._subtask = state.operator.subtask

    def process(self, record: Record) -> None:
        pass

    def snapshot_state(self, checkpoint: int) -> None:
        self._held_until.with_name("held").touch()
        while checkpoint == 1 and not self._held_until.exists():
            time.sleep(0.01)

    def on_end(self) -> Record:
        return {"id": self._subtask}


class SeenToEnd(CountingSource):
    """Leaves a file for each subtask that has read all of its input."""

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        reader = super().reader(splits, context)
        poll, path = reader.poll, Path(f"{self.ends_with}-{context.subtask}")

        def poll_and_tell(timeout_s: float) -> PolledRows | EndOfInput | None:
            polled = poll(timeout_s)
            if isinstance(polled, EndOfInput):
                path.touch()
            return polled

        reader.poll = poll_and_tell  # type: ignore[method-assign]
        return reader


def test_rows_of_the_end_are_there_once_though_the_job_stops_with_a_savepoint_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All input ends while a checkpoint is taken: the savepoint comes before the last one."""
    begun = threading.Event()  # the attempt has the request, and not only the driver
    begin = Savepoints.begin

    def begin_and_tell(savepoints: Savepoints, request: SavepointRequest) -> bool:
        is_begun = begin(savepoints, request)
        begun.set()
        return is_begun

    monkeypatch.setattr(Savepoints, "begin", begin_and_tell)
    end, goes_on = tmp_path / "end", tmp_path / "goes on"
    source = SeenToEnd(200, ends_with=str(end))

    def work(records: Stream) -> Stream:
        return records.key_by("account").process(HeldAtOne(str(goes_on)), uid="work")

    pipeline, sink = _pipeline(tmp_path, source, work, HeapBackend())
    job = pipeline.start()
    await_true((tmp_path / "held").exists)
    end.touch()
    await_true(lambda: all((tmp_path / f"end-{subtask}").exists() for subtask in (0, 1)))
    with ThreadPoolExecutor() as pool:
        stopped = pool.submit(job.stop, 60, savepoint=str(tmp_path / "kept"))
        assert begun.wait(60)
        goes_on.touch()
        savepoint = stopped.result().savepoints[-1].place
    assert sink.rows() == []
    assert pipeline.start(from_savepoint=savepoint).wait(60).state is JobState.FINISHED
    assert _ids(sink) == [0, 1]


def test_only_a_stop_that_drains_is_an_end_of_input(tmp_path: Path) -> None:
    source = CountingSource(200, ends_with=str(tmp_path / "never"))
    pipeline, sink = _pipeline(tmp_path, source, of_keys, HeapBackend())
    job = pipeline.start()
    _await_read(job, 200)
    job.savepoint(timeout_s=60)
    job.stop(60)
    assert sink.rows() == []
    pipeline.start().stop(60, savepoint=True)
    assert sink.rows() == []
    status = pipeline.start().stop(60, savepoint=True, drain=True)
    assert status.state is JobState.FINISHED
    assert _ids(sink) == list(range(200))
