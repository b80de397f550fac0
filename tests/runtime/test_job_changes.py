"""A pipeline that changes between two starts: operators are found again by their uids."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS, assert_exactly_once

from onceflow import Checkpointing, JobState, Pipeline, count, sum_
from onceflow.core.api.stream import Stream
from onceflow.core.errors import ConfigError


def _pipeline(cluster: AnyCluster, directory: Path) -> Pipeline:
    checkpointing = Checkpointing(storage=str(directory / "checkpoints"), interval=0.1)
    return Pipeline(
        cluster, name="changes", parallelism=2, checkpointing=checkpointing, settings=SETTINGS
    )


def _balance(stream: Stream) -> Stream:
    return stream.key_by("account").running(balance=sum_("amount"), n=count(), uid="balance")


def _seen(stream: Stream) -> Stream:
    return stream.key_by("id").running(seen=count(), uid="seen")


def _parity(stream: Stream) -> Stream:
    """An operator that is new, with state of its own."""
    schema = stream.schema.append(pa.field("odd", pa.int64()))
    odd = stream.map(lambda row: {**row, "odd": row["id"] % 2}, schema=schema, uid="odd")
    return odd.key_by("odd").running(of_parity=count(), uid="parity")


def test_operators_that_are_reordered_and_added_keep_the_state_of_their_uids(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(6_000)
    sink = DirectorySink(str(tmp_path / "out"))
    before = _pipeline(cluster, tmp_path)
    _seen(_balance(before.read(source.held_in_the_middle(), uid="records"))).write(
        sink, uid="ledger"
    )
    job = before.start()
    written = source.records // 2
    job.wait_for(checkpoints=2, records=written)
    assert job.stop(60).state is JobState.STOPPED
    assert len(sink.rows()) == written
    after = _pipeline(cluster, tmp_path)
    _balance(_parity(_seen(after.read(source, uid="records")))).write(sink, uid="ledger")
    assert after.run(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)
    rows = sink.rows()
    assert {row["seen"] for row in rows} == {1}
    assert sum("of_parity" in row for row in rows) == source.records - written


def test_two_operators_with_one_uid_are_refused_by_it(cluster: AnyCluster, tmp_path: Path) -> None:
    pipeline = _pipeline(cluster, tmp_path)
    records = pipeline.read(CountingSource(10), uid="records")
    with pytest.raises(ConfigError, match="uid 'balance' is used twice"):
        _balance(records).write(DirectorySink(str(tmp_path / "first")), uid="first")
        _balance(records).write(DirectorySink(str(tmp_path / "second")), uid="second")
        pipeline.start()
