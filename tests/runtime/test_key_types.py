"""Keys from the edges of their types, in whole jobs that stop and start again on each backend."""

from __future__ import annotations

import time
from collections import Counter
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    HeapBackend,
    JobState,
    KeyedFunction,
    MapStateDescriptor,
    NoRestart,
    Pipeline,
    ProcessWindowFunction,
    Record,
    RocksDBBackend,
    StateAccess,
    StateBackend,
    TimeWindow,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from onceflow.core.errors import ConfigError

REPEATED_US = int(datetime(2024, 11, 3, 5, 30, tzinfo=timezone.utc).timestamp()) * 10**6
HOUR_US = 3600 * 10**6
END_US = int(datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone.utc).timestamp()) * 10**6
LONG_AGO_US = -6_000_000 * HOUR_US
"""About the year 1285."""
IN_NEW_YORK = (REPEATED_US, REPEATED_US + HOUR_US, END_US - 24 * HOUR_US, LONG_AGO_US)
"""Microseconds since 1970; the first two are both 1:30 there."""
BEYOND = (*IN_NEW_YORK, -(2**63), 2**63 - 1)
KEY = pa.timestamp("us", "America/New_York")


def with_instants(counts: tuple[int, ...]) -> Any:
    def add(rows: pa.RecordBatch) -> pa.RecordBatch:
        chosen = np.array(counts)[rows.column("id").to_numpy() % len(counts)]
        return rows.append_column("at", pa.array(chosen).view(KEY))

    return add


def as_numbers(rows: pa.RecordBatch) -> pa.RecordBatch:
    at = rows.column("at").view(pa.int64())
    return pa.record_batch([rows.column("id"), at], names=["id", "at"])


NUMBERS = pa.schema([("id", pa.int64()), ("at", pa.int64())])
SCHEMA = pa.schema(
    [("id", pa.int64()), ("account", pa.string()), ("amount", pa.int64()), ("at", KEY)]
)


def pipeline_of(cluster: AnyCluster, directory: Path, backend: StateBackend) -> Pipeline:
    return Pipeline(
        cluster,
        name="keys",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        state_backend=backend,
        restart=NoRestart(),
        settings=SETTINGS,
    )


def run_in_two_parts(make: Any, directory: Path, records: int) -> None:
    """Run half of the records, stop with a checkpoint, and start again with all of them."""
    half = CountingSource(records // 2, ends_with=str(directory / "never"))
    job = make(half).start()
    deadline = time.monotonic() + 60
    while job.status().records_in < half.records:
        assert time.monotonic() < deadline, job.status()
        time.sleep(0.01)
    job.stop(60)
    status = make(CountingSource(records)).start().wait(60)
    assert status.state is JobState.FINISHED


BACKENDS = pytest.mark.parametrize(
    "backend", [HeapBackend(), RocksDBBackend()], ids=["heap", "rocksdb"]
)


@BACKENDS
def test_instants_far_from_today_come_out_of_an_outer_join_as_they_went_in(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    sink = DirectorySink(str(tmp_path / "out"))
    records = 120

    def make(source: CountingSource) -> Pipeline:
        pipeline = pipeline_of(cluster, tmp_path, backend)
        sides = [
            pipeline.read(one, uid=name, watermarks=WatermarkStrategy("id"))
            .map_batches(with_instants(BEYOND), schema=SCHEMA)
            .key_by("at")
            for name, one in (("left", source), ("right", CountingSource(0)))
        ]
        joined = sides[0].interval_join(sides[1], how="left").between(-1, 1)
        only_left = joined.merge(uid="joined", suffixes=("", "_right"))
        only_left.map_batches(as_numbers, schema=NUMBERS).write(sink, uid="out")
        return pipeline

    run_in_two_parts(make, tmp_path, records)
    assert Counter((row["id"], row["at"]) for row in sink.rows()) == Counter(
        (number, BEYOND[number % len(BEYOND)]) for number in range(records)
    )


class CountsByKeyAndAmount(KeyedFunction):
    """Counts records of a key, and by an amount that is written in two ways."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return pa.schema(
            [("id", pa.int64()), ("n", pa.int64()), ("of_amount", pa.int64()), ("us", pa.int64())]
        )

    def open(self, state: StateAccess) -> None:
        self._count = state.value_state(ValueStateDescriptor[int]("count", int, default=0))
        self._by_amount = state.map_state(
            MapStateDescriptor[Decimal, int]("by amount", Decimal, int)
        )

    def process(self, record: Record) -> Record:
        amount = Decimal("1.00") if record["id"] % 3 else Decimal("1.0")
        self._count.set(self._count.get() + 1)
        self._by_amount.put(amount, (self._by_amount.get(amount) or 0) + 1)
        assert len(list(self._by_amount.items())) == 1
        return {
            "id": record["id"],
            "n": self._count.get(),
            "of_amount": self._by_amount.get(Decimal(1)),
            "us": int(record["at"].timestamp()) * 10**6,
        }


@BACKENDS
def test_both_hours_of_a_repeated_one_and_decimals_of_any_scale_find_their_state_again(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    sink = DirectorySink(str(tmp_path / "out"))
    records = 240

    def make(source: CountingSource) -> Pipeline:
        pipeline = pipeline_of(cluster, tmp_path, backend)
        stream = pipeline.read(source, uid="records")
        stream = stream.map_batches(with_instants(IN_NEW_YORK), schema=SCHEMA)
        stream.key_by("at").process(CountsByKeyAndAmount(), uid="counts").write(sink, uid="out")
        return pipeline

    run_in_two_parts(make, tmp_path, records)
    rows = sink.rows()
    assert sorted(row["id"] for row in rows) == list(range(records))
    for at in IN_NEW_YORK:
        mine = [row for row in rows if row["us"] == at]
        counted = list(range(1, records // len(IN_NEW_YORK) + 1))
        assert sorted(row["n"] for row in mine) == counted
        assert sorted(row["of_amount"] for row in mine) == counted


class Nothing(ProcessWindowFunction):
    """Emits nothing of windows whose records are kept."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def process(self, key: Any, window: TimeWindow, records: list[Record]) -> None:
        return None


def test_types_that_fail_at_run_time_are_refused_when_the_pipeline_is_built(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline = pipeline_of(cluster, tmp_path, HeapBackend())

    def typed(kind: pa.DataType, name: str) -> Any:
        schema = pa.schema([("id", pa.int64()), ("account", pa.string()), ("value", kind)])
        records = pipeline.read(CountingSource(1), uid=name, watermarks=WatermarkStrategy("id"))
        return records.map_batches(lambda rows: rows, schema=schema)

    with pytest.raises(ConfigError, match="'value' has type string_view"):
        typed(pa.string_view(), "view").key_by("value")
    with pytest.raises(ConfigError, match=r"key column 'value' has type duration\[ns\]"):
        typed(pa.duration("ns"), "key").key_by("value")
    keyed = typed(pa.duration("ns"), "kept").key_by("account")
    with pytest.raises(ConfigError, match=r"'value', duration\[ns\], cannot be kept"):
        keyed.window(TumblingEventTimeWindows(1)).process(Nothing(), uid="windows")
