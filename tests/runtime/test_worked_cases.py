"""The cases by which textbooks explain Flink's checkpoints, as jobs with a crash in them."""

from __future__ import annotations

import os
import signal
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pytest
from tests.runtime.test_recovery import await_checkpoints
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource, amount_of
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
    cluster: AnyCluster, directory: Path, *, mode: str = "exactly_once", backend: StateBackend
) -> Pipeline:
    return Pipeline(
        cluster,
        name="worked",
        parallelism=2,
        checkpointing=Checkpointing(
            storage=str(directory / "checkpoints"), interval=0.1, mode=mode
        ),
        state_backend=backend,
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )


@pytest.mark.parametrize("mode", ["exactly_once", "at_least_once"])
def test_two_accumulators_of_one_stream_agree_after_a_crash(
    cluster: AnyCluster, tmp_path: Path, mode: str
) -> None:
    """The second adds up what the first says: snapshots of two moments would lose or double."""
    ends = tmp_path / "killed"
    source = CountingSource(6_000, splits_count=1, accounts=1, pause_s=0.01, ends_with=str(ends))
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = pipeline_of(cluster, tmp_path, mode=mode, backend=HeapBackend())
    numbers = pipeline.read(source, uid="numbers")
    first = numbers.key_by("account").process(Accumulate("amount", "first"), uid="first")
    second = first.key_by("account").process(Accumulate("first", "second"), uid="second")
    second.write(sink, uid="out")
    job = pipeline.start()
    await_checkpoints(job, 3)
    os.kill(job.status().slots[0].pid, signal.SIGKILL)
    ends.touch()
    assert job.wait(120).restores >= 1

    rows = sink.rows()
    first_sums = list(accumulate(map(amount_of, range(source.records))))
    wanted = list(zip(first_sums, accumulate(first_sums), strict=True))
    if mode == "exactly_once":
        assert Counter(row["id"] for row in rows) == Counter(range(source.records))
        assert [
            (row["first"], row["second"]) for row in sorted(rows, key=lambda row: row["id"])
        ] == wanted
    else:
        # Nothing is lost; a record that comes twice may be in a sum twice.
        assert {row["id"] for row in rows} == set(range(source.records))


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
    await_checkpoints(job, 3)
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
def test_a_count_for_each_of_a_million_users_is_a_state_of_their_size(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    """Four bytes a count, a million of them: 4 MB, and the keys."""
    users = 1_000_000
    source = CountingSource(2 * users, accounts=users, batch_rows=20_000)
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = pipeline_of(cluster, tmp_path, backend=backend)
    visits = pipeline.read(source, uid="visits")
    visits.key_by("account").running(visits=count(), uid="count").write(sink, uid="out")
    job = pipeline.start()
    await_checkpoints(job, 1, timeout_s=120)
    os.kill(job.status().slots[0].pid, signal.SIGKILL)
    status = job.wait(300)
    assert status.restores >= 1
    size_bytes = max(one.size_bytes for one in status.history)
    assert 4 * users <= size_bytes <= 40 * users
    seen: list[int] = []
    for path in Path(sink.directory, "committed").iterdir():
        with pa.ipc.open_file(path) as reader:
            seen += reader.read_all().column("visits").to_pylist()
    assert Counter(seen) == {1: users, 2: users}
