"""Tests that returned values arrive exactly, or end the job with column, value and record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import SCHEMA, CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import (
    AggregateFunction,
    Checkpointing,
    KeyedFunction,
    NoRestart,
    Pipeline,
    ProcessFunction,
    ProcessWindowFunction,
    Stream,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from onceflow.core.errors import UserFunctionError
from onceflow.core.plan.functions import Record

RECORDS = 100


def begin(cluster: AnyCluster, directory: Path) -> tuple[Pipeline, Stream, DirectorySink]:
    pipeline = Pipeline(
        cluster,
        name="values",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        restart=NoRestart(),
        settings=SETTINGS,
    )
    source = CountingSource(RECORDS, splits_count=1, accounts=5)
    records = pipeline.read(source, uid="records", watermarks=WatermarkStrategy("id"))
    return pipeline, records, DirectorySink(str(directory / "out"))


def priced(record: Record) -> Record:
    """Add a price to one record that no integer holds."""
    return record | {"amount": 99.99 if record["id"] == 42 else record["amount"]}


class Priced(ProcessFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def process(self, record: Record) -> Record:
        return priced(record)


class KeyedPriced(KeyedFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def process(self, record: Record) -> Record:
        return priced(record)


class WindowPriced(ProcessWindowFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def process(self, key: Any, window: Any, records: list[Record]) -> Iterator[Record]:
        yield from map(priced, records)


class Mean(AggregateFunction[Record, Any, Record]):
    def create_accumulator(self) -> Any:
        return 0

    def add(self, value: Record, accumulator: Any) -> Any:
        return accumulator + value["amount"]

    def get_result(self, accumulator: Any) -> Record:
        return {"mean": 0.5}


def priced_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [priced(record) for record in batch.to_pylist()],
        schema=SCHEMA.set(2, pa.field("amount", pa.float64())),
    )


def priced_frames(frames: Iterator[Any]) -> Iterator[Any]:
    for frame in frames:
        prices = [99.99 if one == 42 else 1 for one in frame["id"]]
        yield frame.assign(amount=frame["amount"].astype(object)).assign(amount=prices)


def with_step(stream: Stream, kind: str) -> Stream:
    windows = TumblingEventTimeWindows("1 s")
    steps = {
        "map": lambda: stream.map(priced, uid="step"),
        "flat_map": lambda: stream.flat_map(lambda record: [priced(record)], uid="step"),
        "process": lambda: stream.process(Priced(), uid="step"),
        "keyed": lambda: stream.key_by("account").process(KeyedPriced(), uid="step"),
        "window": lambda: (
            stream.key_by("account").window(windows).process(WindowPriced(), uid="step")
        ),
        "aggregate_by": lambda: (
            stream.key_by("account")
            .window(windows)
            .aggregate_by(Mean(), schema="mean BIGINT", uid="step")
        ),
        "map_batches": lambda: stream.map_batches(priced_batch, uid="step"),
        "map_pandas": lambda: stream.map_pandas(priced_frames, uid="step"),
    }
    return steps[kind]()


@pytest.mark.parametrize(
    "kind",
    [
        "map",
        "flat_map",
        "process",
        "keyed",
        "window",
        "aggregate_by",
        "map_batches",
        "map_pandas",
    ],
)
def test_a_returned_number_that_its_column_does_not_hold_ends_the_job_and_is_written_nowhere(
    cluster: AnyCluster, tmp_path: Path, kind: str
) -> None:
    pipeline, stream, sink = begin(cluster, tmp_path)
    with_step(stream, kind).write(sink, uid="out")
    column, value = ("mean", "0.5") if kind == "aggregate_by" else ("amount", "99.99")
    with pytest.raises(UserFunctionError) as raised:
        pipeline.run(60)
    text = str(raised.value)
    assert "'step'" in text
    assert f"column '{column}'" in text
    assert value in text
    assert "int64" in text
    assert [row for row in sink.rows() if row.get("id") == 42] == []


def counted(record: Record) -> Iterator[Record]:
    shared: Record = dict(record)
    tags: list[int] = []
    shared["tags"] = tags
    for number in range(3):
        shared["amount"] = number
        tags.append(number)
        yield shared


class Counted(ProcessFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema.append(pa.field("tags", pa.list_(pa.int64())))

    def process(self, record: Record) -> Iterator[Record]:
        return counted(record)


class WindowCounted(ProcessWindowFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema.append(pa.field("tags", pa.list_(pa.int64())))

    def process(self, key: Any, window: Any, records: list[Record]) -> Iterator[Record]:
        for record in records:
            yield from counted(record)


@pytest.mark.parametrize("kind", ["flat_map", "process", "window"])
def test_a_generator_that_yields_one_dict_again_gives_what_it_held_each_time(
    cluster: AnyCluster, tmp_path: Path, kind: str
) -> None:
    pipeline, stream, sink = begin(cluster, tmp_path)
    if kind == "flat_map":
        schema = Counted().output_schema(stream.schema)
        made = stream.flat_map(counted, schema=schema, uid="step")
    elif kind == "process":
        made = stream.process(Counted(), uid="step")
    else:
        windows = TumblingEventTimeWindows("1 s")
        made = stream.key_by("account").window(windows).process(WindowCounted(), uid="step")
    made.write(sink, uid="out")
    pipeline.run(60)
    rows = sorted((row["id"], row["amount"], row["tags"]) for row in sink.rows())
    held = [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])]
    assert rows == [(record, *one) for record in range(RECORDS) for one in held]


def test_a_column_that_the_schema_lacks_is_told_and_not_dropped(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, stream, sink = begin(cluster, tmp_path)
    stream.map(lambda record: record | {"x": 1}, uid="step").write(sink, uid="out")
    lacks = r"'x', but its schema has only the columns id, account, amount"
    with pytest.raises(UserFunctionError, match=lacks):
        pipeline.run(60)
    assert sink.rows() == []


NESTED = SCHEMA.append(pa.field("m", pa.map_(pa.string(), pa.int64()))).append(
    pa.field("l", pa.list_(pa.int64()))
)


def with_map_and_list(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add a map, and a list as a list view: empty ones, and others behind them."""
    ids = cast("list[int]", batch.column("id").to_pylist())
    maps = pa.array([[("a", one), ("b", None)][: one % 3] for one in ids], NESTED.field("m").type)
    lists = pa.array([[one] * (one % 2) for one in ids], pa.list_view(pa.int64()))
    return batch.append_column("m", maps).append_column("l", lists)


class Kept(KeyedFunction):
    """Returns each record as a state of `dict` has kept it."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def open(self, state: Any) -> None:
        self.kept = state.value_state(ValueStateDescriptor("kept", dict))

    def process(self, record: Record) -> Record:
        self.kept.set(record)
        return cast("Record", self.kept.get())


class Unchanged(ProcessWindowFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def process(self, key: Any, window: Any, records: list[Record]) -> list[Record]:
        return records


@pytest.mark.parametrize("kind", ["batches", "map", "state", "window"])
def test_maps_and_lists_of_records_come_back_as_they_were(
    cluster: AnyCluster, tmp_path: Path, kind: str
) -> None:
    pipeline, stream, sink = begin(cluster, tmp_path)
    given = stream.map_batches(with_map_and_list, schema=NESTED)
    made = {
        "batches": lambda: given,
        "map": lambda: given.map(lambda record: record | {"amount": 0}),
        "state": lambda: given.key_by("account").process(Kept(), uid="step"),
        "window": lambda: (
            given.key_by("account")
            .window(TumblingEventTimeWindows("1 s"))
            .process(Unchanged(), uid="step")
        ),
    }[kind]()
    made.write(sink, uid="out")
    pipeline.run(60)
    rows = sorted(sink.rows(), key=lambda row: row["id"])
    assert [([*map(tuple, row["m"])], row["l"]) for row in rows] == [
        ([("a", one), ("b", None)][: one % 3], [one] * (one % 2)) for one in range(RECORDS)
    ]


LARGE = 2**53 + 1


def as_pandas_has_it(frames: Iterator[Any]) -> Iterator[Any]:
    yield from frames


def with_nulls(batch: pa.RecordBatch) -> pa.RecordBatch:
    ids = cast("list[int]", batch.column("id").to_pylist())
    amounts = [None if one % 3 == 0 else LARGE + one for one in ids]
    return batch.set_column(2, "amount", pa.array(amounts, pa.int64()))


def test_integers_beside_nulls_pass_through_pandas_as_they_are(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, stream, sink = begin(cluster, tmp_path)
    large = stream.map_batches(with_nulls, uid="large")
    large.map_pandas(as_pandas_has_it, uid="step").write(sink, uid="out")
    pipeline.run(60)
    found = {row["id"]: row["amount"] for row in sink.rows()}
    assert found == {one: None if one % 3 == 0 else LARGE + one for one in range(RECORDS)}
