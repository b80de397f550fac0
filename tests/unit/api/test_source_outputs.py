"""A source with several outputs is read as a stream for each output, and misuse is named."""

from __future__ import annotations

import pytest
from tests.support.two_outputs import OUTPUTS, TwoOutputs

from onceflow import (
    Checkpointing,
    FileSystemStorage,
    LocalProcesses,
    Pipeline,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    count,
)
from onceflow.core.errors import ConfigError
from onceflow.core.spi.dead_letters import DEAD_LETTERS_TAG
from onceflow.sinks import FileSink
from onceflow.sources import DatagenSource


def _pipeline() -> Pipeline:
    storage = Checkpointing(storage=FileSystemStorage("checkpoints"))
    return Pipeline(LocalProcesses(), name="shop", parallelism=2, checkpointing=storage)


def test_each_output_is_a_stream_with_its_own_schema() -> None:
    pipeline = _pipeline()
    streams = pipeline.read_outputs(TwoOutputs(), uid="shop")
    assert {name: stream.schema for name, stream in streams.items()} == OUTPUTS
    streams["orders"].write(FileSink("rows"), uid="orders")
    streams["customers"].map_batches(lambda batch: batch).write(FileSink("names"), uid="customers")
    assert dict(pipeline.describe().sources) == {"shop": TwoOutputs()}


def test_an_output_that_nothing_reads_is_allowed_and_a_source_that_nothing_reads_is_not() -> None:
    pipeline = _pipeline()
    streams = pipeline.read_outputs(TwoOutputs(), uid="shop")
    with pytest.raises(ConfigError, match="no operator or sink reads the output of shop"):
        pipeline.describe()
    streams["customers"].write(FileSink("rows"), uid="customers")
    pipeline.describe()


def test_the_other_way_to_read_is_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"read\(uid='shop'\): the source has an output stream for each of orders, customers."
        r" Read it with read_outputs\(source, uid='shop'\)",
    ):
        _pipeline().read(TwoOutputs(), uid="shop")
    with pytest.raises(
        ConfigError,
        match=r"read_outputs\(uid='in'\): DatagenSource has one stream; read it with read\(",
    ):
        _pipeline().read_outputs(DatagenSource(rows=1), uid="in")


def test_watermarks_name_an_output_and_one_of_its_columns() -> None:
    with pytest.raises(ConfigError, match="no output 'parts'; there are orders, customers"):
        _pipeline().read_outputs(
            TwoOutputs(), uid="shop", watermarks={"parts": WatermarkStrategy("at")}
        )
    with pytest.raises(ConfigError, match="no such column; there are name, at"):
        _pipeline().read_outputs(
            TwoOutputs(), uid="shop", watermarks={"customers": WatermarkStrategy("amount")}
        )


def test_a_window_needs_the_watermarks_of_its_own_output() -> None:
    streams = _pipeline().read_outputs(
        TwoOutputs(), uid="shop", watermarks={"orders": WatermarkStrategy("at")}
    )
    streams["orders"].key_by("id").window(TumblingEventTimeWindows("1 s")).aggregate(
        n=count(), uid="n"
    )
    with pytest.raises(ConfigError, match="its sources need watermarks"):
        streams["customers"].key_by("name").window(TumblingEventTimeWindows("1 s"))


def test_an_output_cannot_have_the_name_of_the_dead_letters() -> None:
    source = TwoOutputs(names=(DEAD_LETTERS_TAG,), schemas={DEAD_LETTERS_TAG: OUTPUTS["orders"]})
    with pytest.raises(ConfigError, match="an output cannot have the name 'dead letters'"):
        _pipeline().read_outputs(source, uid="shop")
