"""Streams that are united, and side outputs: each record once, whatever happens to slots."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import SCHEMA, CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.held_up import await_checkpoint, kill_a_slot, killed_and_rescaled
from tests.support.ledger import SETTINGS
from tests.support.scripted_sink import ScriptedSink, throttled_sink

from onceflow import (
    Checkpointing,
    FixedDelay,
    HeapBackend,
    JobState,
    KeyedFunction,
    NoRestart,
    OutputTag,
    Pipeline,
    Record,
    RocksDBBackend,
    StateAccess,
    StateBackend,
    Stream,
    count,
)
from onceflow.core.errors import ConfigError

SOURCE = CountingSource(1_500, splits_count=3, batch_rows=20)
PARTS = 4
"""Sources that are united: the records of one are those of the other, with other ids."""


WALKS = pytest.mark.parametrize(
    ("backend", "unaligned"),
    [
        pytest.param(HeapBackend(), False, id="heap-aligned", marks=pytest.mark.slow),
        pytest.param(RocksDBBackend(), True, id="rocksdb-unaligned"),
        pytest.param(HeapBackend(), True, id="heap-unaligned", marks=pytest.mark.slow),
        pytest.param(RocksDBBackend(), False, id="rocksdb-aligned", marks=pytest.mark.slow),
    ],
)


def begin(
    cluster: AnyCluster,
    directory: Path,
    *,
    backend: StateBackend | None = None,
    parallelism: int = 2,
    unaligned: bool = False,
    restart: bool = True,
    timeout: float = 600.0,
) -> Pipeline:
    return Pipeline(
        cluster,
        name="united",
        parallelism=parallelism,
        checkpointing=Checkpointing(
            storage=str(directory / "checkpoints"),
            interval=0.1,
            timeout=timeout,
            unaligned=unaligned,
        ),
        state_backend=backend,
        restart=FixedDelay(attempts=20, delay_s=0.01) if restart else NoRestart(),
        settings=replace(SETTINGS, channel_batches=4),
    )


def part(pipeline: Pipeline, number: int, source: CountingSource = SOURCE) -> Stream:
    """Read the records with ids of their own."""

    def moved(rows: pa.RecordBatch) -> pa.RecordBatch:
        ids = pc.add(rows["id"], number * source.records)
        return pa.record_batch([ids, *rows.columns[1:]], schema=SCHEMA)

    return pipeline.read(source, uid=f"part-{number}").map_batches(moved)


def united(
    cluster: AnyCluster,
    directory: Path,
    *,
    backend: StateBackend | None = None,
    parallelism: int = 2,
    unaligned: bool = False,
) -> tuple[Pipeline, ScriptedSink]:
    """Unite before an exchange by key, on one thread, and where chains meet without exchange."""
    sink = throttled_sink(directory / "out")
    pipeline = begin(
        cluster, directory, backend=backend, parallelism=parallelism, unaligned=unaligned
    )
    parts = [part(pipeline, number) for number in range(PARTS)]
    counted = parts[0].union(parts[1]).key_by("account").running(n=count(), uid="counted")
    halves = [
        counted.filter(lambda record: record["id"] % 2 == 0),
        counted.filter(lambda record: record["id"] % 2 == 1),
    ]
    as_counted = counted.schema

    def once(rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch([*rows.columns, pa.array([1] * rows.num_rows)], schema=as_counted)

    others = [one.map_batches(once, schema=as_counted) for one in parts[2:]]
    everything = halves[0].union(halves[1], *others).map_batches(lambda rows: rows, uid="meeting")
    everything.key_by("id").running(seen=count(), uid="seen").write(sink, uid="out")
    return pipeline, sink


@WALKS
@pytest.mark.only_proof
def test_united_records_come_once_through_kills_and_rescaling(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend, unaligned: bool
) -> None:
    rows = killed_and_rescaled(
        lambda parallelism: united(
            cluster, tmp_path, backend=backend, parallelism=parallelism, unaligned=unaligned
        ),
        unaligned=unaligned,
    )
    assert Counter(row["id"] for row in rows) == Counter(range(PARTS * SOURCE.records))
    assert {row["seen"] for row in rows} == {1}
    counts = Counter((row["account"], row["n"]) for row in rows if row["id"] < 2 * SOURCE.records)
    assert set(counts.values()) == {1}, "two records of one key were counted as the same"


def test_streams_that_are_not_alike_are_refused_by_name(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, other = begin(cluster, tmp_path), begin(cluster, tmp_path)
    records = pipeline.read(SOURCE, uid="records")
    fewer = records.map(dict, schema="id BIGINT, account STRING")
    text = records.map(dict, schema="id STRING, account STRING, amount BIGINT")
    with pytest.raises(ConfigError, match="number 1: it has columns id, account, and the first"):
        records.union(fewer)
    with pytest.raises(ConfigError, match="number 2: its column id is string, and .* id is int64"):
        records.union(records, text)
    with pytest.raises(ConfigError, match="two pipelines"):
        records.union(other.read(SOURCE, uid="records"))
    with pytest.raises(ConfigError, match="needs another"):
        records.union()


LARGE = OutputTag("large", "account STRING, amount BIGINT")


class LargeAside(KeyedFunction):
    """Emits every record, and the large ones to a side output, too."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def open(self, state: StateAccess) -> None:
        self._large = state.side_output(LARGE)

    def process(self, record: Record) -> Record:
        if record["amount"] > 900:
            self._large.emit({"account": record["account"], "amount": record["amount"]})
        return record


def test_side_outputs_come_once_through_kills(cluster: AnyCluster, tmp_path: Path) -> None:
    source = CountingSource(20_000, pause_s=0.002, ends_with=str(tmp_path / "killed"))
    pipeline = begin(cluster, tmp_path)
    every, large = (DirectorySink(str(tmp_path / name)) for name in ("every", "large"))
    processed = (
        pipeline.read(source, uid="records").key_by("account").process(LargeAside(), uid="p")
    )
    processed.write(every, uid="every")
    processed.side_output(LARGE).filter(lambda record: True).write(large, uid="large")
    job = pipeline.start()
    for number in range(2):
        await_checkpoint(job)
        kill_a_slot(job, number)
    (tmp_path / "killed").touch()
    assert job.wait(120).state is JobState.FINISHED
    amounts = Counter(row["amount"] for row in every.rows())
    assert sum(amounts.values()) == source.records
    expected = Counter({amount: n for amount, n in amounts.items() if amount > 900})
    assert Counter(row["amount"] for row in large.rows()) == expected


def test_side_outputs_that_nobody_takes_are_dropped(cluster: AnyCluster, tmp_path: Path) -> None:
    pipeline = begin(cluster, tmp_path)
    sink = DirectorySink(str(tmp_path / "out"))
    records = pipeline.read(CountingSource(500), uid="records")
    records.key_by("account").process(LargeAside(), uid="p").write(sink, uid="out")
    assert pipeline.run(60).state is JobState.FINISHED
    assert len(sink.rows()) == 500


def test_mistakes_with_side_outputs_are_told_by_name(cluster: AnyCluster, tmp_path: Path) -> None:
    pipeline = begin(cluster, tmp_path, restart=False)
    records = pipeline.read(CountingSource(500), uid="records")
    with pytest.raises(
        ConfigError, match="not the output of process.. or process_batches.., which"
    ):
        records.side_output(LARGE)
    with pytest.raises(ConfigError, match="without spaces"):
        OutputTag("too large", "account STRING")
    processed = records.key_by("account").process(LargeAside(), uid="p")
    sink = DirectorySink(str(tmp_path / "out"))
    processed.side_output(OutputTag("late", LARGE.schema)).write(sink, uid="out")
    with pytest.raises(ConfigError, match="output 'late' of operator 'p' is used with columns"):
        processed.side_output(OutputTag("late", "id BIGINT")).write(sink, uid="again")
    with pytest.raises(ConfigError, match="'late' of operator 'p' is used, but .* no side output"):
        pipeline.run(60)
