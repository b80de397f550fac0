"""Tests that a method of a stream refuses an argument that is no function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.counting_source import CountingSource

from onceflow import (
    Checkpointing,
    CoGroupBatch,
    CoGroupBatchFunction,
    KeyedFunction,
    LocalProcesses,
    Pipeline,
    ProcessFunction,
    Stream,
    TumblingProcessingTimeWindows,
)
from onceflow.core.errors import ConfigError
from onceflow.core.plan.functions import Record


class Plain(ProcessFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def process(self, record: Record) -> Record:
        return record


class Keyed(KeyedFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def process(self, record: Record) -> Record:
        return record


def begin(directory: Path) -> Any:
    """A stream as one of no known type: what is passed to it is wrong on purpose."""
    pipeline = Pipeline(
        LocalProcesses(),
        name="checks",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(directory)),
    )
    stream: Stream = pipeline.read(CountingSource(1), uid="records")
    return stream


class OfWindows(CoGroupBatchFunction):
    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return left

    def process(self, windows: CoGroupBatch) -> pa.RecordBatch:
        return windows.left.rows


def both(stream: Any) -> Any:
    return stream.connect(stream).key_by("account", "account")


def identity(record: Record) -> Record:
    return record


WINDOWS = TumblingProcessingTimeWindows("1 s")
MISTAKES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda s: s.map({"x": 1}), r"map\(\) takes a function, and was given \{'x': 1\}"),
    (lambda s: s.map(Plain()), r"map\(\) .*a ProcessFunction: that is for process\(\)"),
    (lambda s: s.flat_map(None), r"flat_map\(\) takes a function"),
    (lambda s: s.filter("x > 1"), r"filter\(\) takes a function, and was given 'x > 1'"),
    (lambda s: s.map_batches(1), r"map_batches\(\) takes a function"),
    (lambda s: s.map_pandas(1), r"map_pandas\(\) takes a function"),
    (lambda s: s.process(identity, uid="p"), r"the function identity.*map\(\) or flat_map\(\)"),
    (lambda s: s.process(Plain, uid="p"), r"given the class Plain itself: say Plain\(…\)"),
    (lambda s: s.process(Keyed(), uid="p"), r"a KeyedFunction: that is for key_by\(…\)\.process"),
    (
        lambda s: s.key_by("account").process(Plain(), uid="p"),
        r"of KeyedFunction, .*a ProcessFunction: that is for process\(\) of a stream without a key",
    ),
    (lambda s: s.key_by("account").process(identity, uid="p"), r"map\(\) or flat_map\(\)"),
    (lambda s: s.key_by("account").process_batches(Keyed(), uid="p"), r"KeyedBatchFunction"),
    (lambda s: s.key_by("account").running(total="amount", uid="p"), r"running\(total=…\) .*sum_"),
    (lambda s: s.key_by("account").running(uid="p"), r"running\(\) needs at least one aggregate"),
    (
        lambda s: s.key_by("account").window(WINDOWS).aggregate(uid="p"),
        r"aggregate\(\) needs at least one aggregate",
    ),
    (
        lambda s: s.key_by("account").count_window(2).aggregate(uid="p"),
        r"aggregate\(\) needs at least one aggregate",
    ),
    (
        lambda s: s.key_by("account").count_window(2).aggregate(total=1, uid="p"),
        r"aggregate\(total=…\) takes an aggregate",
    ),
    (lambda s: s.key_by("account").window(WINDOWS).process(identity, uid="p"), r"ProcessWindow"),
    (
        lambda s: s.key_by("account").window(WINDOWS).aggregate(total=1, uid="p"),
        r"aggregate\(total=…\) takes an aggregate",
    ),
    (
        lambda s: s.key_by("account").window(WINDOWS).aggregate_by(sum, schema="n INT", uid="p"),
        r"AggregateFunction",
    ),
    (
        lambda s: s.connect(s).key_by("account", "account").process(identity, uid="p"),
        r"CoProcessFunction",
    ),
    (
        lambda s: (
            s.connect(s).key_by("account", "account").window(WINDOWS).co_group(identity, uid="p")
        ),
        r"CoGroupFunction",
    ),
    (
        lambda s: both(s).window(WINDOWS).co_group_batches(identity, uid="p"),
        r"CoGroupBatchFunction",
    ),
    (
        lambda s: both(s).window(WINDOWS).co_group(OfWindows(), uid="p"),
        r"a CoGroupBatchFunction: that is for .*co_group_batches\(\)",
    ),
    (
        lambda s: both(s).window(WINDOWS).co_group_batches(OfWindows(), uid="p"),
        r"co_group_batches\(\) of TumblingProcessingTimeWindows: these take one record at a time",
    ),
    (
        lambda s: (
            s.key_by("account").join(s.key_by("account"), ttl=None).process(identity, uid="p")
        ),
        r"ProcessJoinFunction",
    ),
]


@pytest.mark.parametrize(("build", "problem"), MISTAKES)
def test_what_is_no_function_of_the_method_is_refused_when_the_pipeline_is_built(
    tmp_path: Path, build: Callable[[Any], Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        build(begin(tmp_path))


def test_a_key_inside_of_a_struct_is_refused_with_the_way_to_have_it(tmp_path: Path) -> None:
    nested = pa.schema([("id", pa.int64()), ("customer", pa.struct([("name", pa.string())]))])
    stream = begin(tmp_path).map(identity, schema=nested)
    with pytest.raises(ConfigError, match="'name' is a field of column 'customer'") as raised:
        stream.key_by("customer.name")
    query = str(raised.value).partition('.sql("')[2].partition('")')[0]
    assert query == "SELECT *, customer['name'] AS customer_name FROM stream"
    assert stream.sql(query).key_by("customer_name").schema.names[-1] == "customer_name"
