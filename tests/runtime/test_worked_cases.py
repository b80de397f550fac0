"""The cases by which textbooks explain Flink's checkpoints, as jobs with a crash in them."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import SCHEMA, CountingSource, amount_of
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    FixedDelay,
    HeapBackend,
    KeyedFunction,
    Pipeline,
    Record,
    RocksDBBackend,
    StateAccess,
    StateBackend,
    ValueStateDescriptor,
    count,
)
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi import EndOfInput, ReaderContext, Source, SourceReader, Split


class Accumulate(KeyedFunction):
    """Adds `column` up for each key, and tells the sum so far as `into`."""

    def __init__(self, column: str, into: str) -> None:
        self._column, self._into = column, into

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema.append(pa.field(self._into, pa.int64()))

    def open(self, state: StateAccess) -> None:
        self._sum = state.value_state(ValueStateDescriptor("sum", int, default=0))

    def process(self, record: Record) -> Record:
        self._sum.set(self._sum.get() + record[self._column])
        return record | {self._into: self._sum.get()}


def pipeline_of(
    cluster: AnyCluster,
    directory: Path,
    *,
    mode: str = "exactly_once",
    interval: float | None = 0.1,
    backend: StateBackend,
) -> Pipeline:
    return Pipeline(
        cluster,
        name="worked",
        parallelism=2,
        checkpointing=Checkpointing(
            storage=str(directory / "checkpoints"), interval=interval, mode=mode
        ),
        state_backend=backend,
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )


def test_two_accumulators_of_one_stream_agree_after_a_crash(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """The second adds up what the first says: snapshots of two moments would lose or double."""
    ends = tmp_path / "killed"
    source = CountingSource(6_000, splits_count=1, accounts=1, pause_s=0.01, ends_with=str(ends))
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = pipeline_of(cluster, tmp_path, backend=HeapBackend())
    numbers = pipeline.read(source, uid="numbers")
    first = numbers.key_by("account").process(Accumulate("amount", "first"), uid="first")
    second = first.key_by("account").process(Accumulate("first", "second"), uid="second")
    second.write(sink, uid="out")
    job = pipeline.start()
    job.wait_for(checkpoints=3)
    os.kill(job.status().slots[0].pid, signal.SIGKILL)
    ends.touch()
    assert job.wait(120).restores >= 1

    rows = sink.rows()
    first_sums = list(accumulate(map(amount_of, range(source.records))))
    wanted = list(zip(first_sums, accumulate(first_sums), strict=True))
    assert Counter(row["id"] for row in rows) == Counter(range(source.records))
    assert [
        (row["first"], row["second"]) for row in sorted(rows, key=lambda row: row["id"])
    ] == wanted


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 90
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


@dataclass(frozen=True)
class LateBarrierSource(Source):
    """Ids 0 to 199 in split 0, of which some come after its barrier; split 1 holds its own back.

    The reader of split 0 emits half of its records, and the rest once its first barrier has passed.
    That of split 1 has none, and lets no barrier through until `passed` is there.
    """

    directory: Path
    passed: Path

    RECORDS = 200

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA

    @property
    def bounded(self) -> bool:
        return True

    def splits(self) -> Sequence[Split]:
        return [Split("0", b"0"), Split("1", b"0")]

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        return _LateBarrierReader(self, splits)


class _LateBarrierReader(SourceReader):
    def __init__(self, source: LateBarrierSource, splits: Sequence[Split]) -> None:
        self._source = source
        (self._split,) = splits
        self._next = int(self._split.position)
        self._barrier_at = source.directory / "barrier"
        if self._split.id == "0" and self._barrier_at.exists():
            # A later attempt: where it begins is what the checkpoint holds.
            (source.directory / "restored").write_text(str(self._next))

    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        source = self._source
        if self._split.id == "1":
            (source.directory / "holding").touch()
            deadline = time.monotonic() + 100
            while not source.passed.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        elif self._next < source.RECORDS and (
            self._next < source.RECORDS / 2 or self._barrier_at.exists()
        ):
            # Few batches: all that come after the barrier fit into a channel.
            ids = np.arange(self._next, self._next + 50)
            self._next += len(ids)
            amounts = [amount_of(number) for number in ids.tolist()]
            return pa.record_batch([ids, ["0"] * len(ids), amounts], schema=SCHEMA)
        if self._next == source.RECORDS:
            (source.directory / "read").touch()
        if (source.directory / "killed").exists():
            return EndOfInput()
        time.sleep(timeout_s)
        return None

    def snapshot(self) -> Sequence[Split]:
        if self._split.id == "0":
            self._barrier_at.touch()
        return [Split(self._split.id, str(self._next).encode())]

    def close(self) -> None:
        pass


class MarkingLast(Accumulate):
    """Leaves a file when it has processed the last record."""

    def __init__(self, directory: Path) -> None:
        super().__init__("amount", "first")
        self._marker = directory / "processed"

    def process(self, record: Record) -> Record:
        if record["id"] == LateBarrierSource.RECORDS - 1:
            self._marker.touch()
        return super().process(record)


@pytest.mark.parametrize("mode", ["exactly_once", "at_least_once"])
def test_records_that_overtake_a_barrier_count_twice_at_least_once_and_once_exactly_once(
    cluster: AnyCluster, tmp_path: Path, mode: str
) -> None:
    """A barrier is held back on one channel until the records behind it on the other are through.

    At least once these are in the snapshot, and the source's position is before them. Exactly once
    they wait, so that only their reading is waited for.
    """
    at_least_once = mode == "at_least_once"
    source = LateBarrierSource(tmp_path, tmp_path / ("processed" if at_least_once else "read"))
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = pipeline_of(cluster, tmp_path, mode=mode, interval=None, backend=HeapBackend())
    numbers = pipeline.read(source, uid="numbers")
    first = numbers.key_by("account").process(MarkingLast(tmp_path), uid="first")
    second = first.key_by("account").process(Accumulate("first", "second"), uid="second")
    second.write(sink, uid="out")
    job = pipeline.start()
    # A barrier that came before its first poll would not be held back.
    await_file(tmp_path / "holding")
    job.checkpoint()
    job.wait_for(checkpoints=1)
    os.kill(job.status().slots[0].pid, signal.SIGKILL)
    (tmp_path / "killed").touch()
    assert job.wait(120).restores >= 1

    restored = int((tmp_path / "restored").read_text())
    assert restored <= source.RECORDS / 2
    ids = list(range(source.RECORDS))
    if at_least_once:
        ids += range(restored, source.RECORDS)
    first_sums = list(accumulate(map(amount_of, ids)))
    wanted = Counter(zip(ids, first_sums, accumulate(first_sums), strict=True))
    assert Counter((row["id"], row["first"], row["second"]) for row in sink.rows()) == wanted


def test_three_operators_in_parallel_and_a_shuffle_into_one_writer_survive_a_crash(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    ends = tmp_path / "killed"
    source = CountingSource(8_000, splits_count=2, accounts=20, pause_s=0.01, ends_with=str(ends))
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = pipeline_of(cluster, tmp_path, backend=HeapBackend())
    cents = pipeline.read(source, uid="numbers").map(
        lambda record: record | {"all": 0}, schema=source.schema.append(pa.field("all", pa.int64()))
    )
    sums = cents.key_by("account").process(Accumulate("amount", "sum"), uid="sums")
    # One key: one subtask takes all rows, from both of those before it.
    gathered = sums.key_by("all").process(Accumulate("amount", "total"), uid="gathered")
    gathered.write(sink, uid="out")
    job = pipeline.start()
    job.wait_for(checkpoints=3)
    os.kill(job.status().slots[1].pid, signal.SIGKILL)
    ends.touch()
    assert job.wait(120).restores >= 1

    rows = sink.rows()
    assert Counter(row["id"] for row in rows) == Counter(range(source.records))
    assert sum(map(amount_of, range(source.records))) in {row["total"] for row in rows}
    by_account = Counter(row["account"] for row in rows)
    assert set(by_account.values()) == {source.records // source.accounts}
    names = (path.name.replace("~", "/") for path in Path(sink.directory, "committed").iterdir())
    written = [one for one in map(TransactionId.parse, names) if one is not None]
    assert len({one.subtask for one in written}) == 1


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(HeapBackend(), id="heap"),
        pytest.param(RocksDBBackend(), id="rocksdb", marks=pytest.mark.slow),
    ],
)
@pytest.mark.only_proof
def test_a_count_for_each_of_a_million_users_is_a_state_of_their_size(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    """Four bytes a count, a million of them: 4 MB, and the keys."""
    users = 1_000_000
    ends = tmp_path / "killed"
    source = CountingSource(2 * users, accounts=users, batch_rows=20_000, ends_with=str(ends))
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = pipeline_of(cluster, tmp_path, backend=backend)
    visits = pipeline.read(source, uid="visits")
    visits.key_by("account").running(visits=count(), uid="count").write(sink, uid="out")
    job = pipeline.start()
    job.wait_for(checkpoints=1)
    os.kill(job.status().slots[0].pid, signal.SIGKILL)
    ends.touch()
    status = job.wait(300)
    assert status.restores >= 1
    size_bytes = max(one.size_bytes for one in status.history)
    assert 4 * users <= size_bytes <= 40 * users
    seen: list[int] = []
    for path in Path(sink.directory, "committed").iterdir():
        with pa.ipc.open_file(path) as reader:
            seen += reader.read_all().column("visits").to_pylist()
    assert Counter(seen) == {1: users, 2: users}
