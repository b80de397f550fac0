"""The process that commits a `write` is killed: `save` returns, or its error says what is there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from examples.own_sink import OwnSink
from pyspark.sql import SparkSession
from tests.spark_formats.batches import killed_at
from tests.spark_formats.write_cases import TOKEN, WriteCase, sqlite_case, sqlite_ids
from tests.spark_formats.writes import Write

from onceflow import connectors
from onceflow.core.crash_points import CrashPoint
from onceflow.core.errors import SinkError


def save(spark: SparkSession, options: Mapping[str, str], name: str) -> None:
    rows = spark.range(0, 100, numPartitions=2)
    rows.write.format(name).mode("append").options(**options).save()


@pytest.mark.spark
@pytest.mark.parametrize("point", ["logged", pytest.param("replied", marks=pytest.mark.slow)])
def test_a_write_whose_commit_is_killed_after_the_decision_is_whole_and_returns(
    spark: SparkSession,
    crash_points: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    point: CrashPoint,
) -> None:
    connectors.register(spark)
    case = sqlite_case(request, tmp_path, "events")
    (crash_points / point).touch()
    save(spark, case.options, case.format)
    assert not (crash_points / point).exists()
    assert case.ids() == list(range(100))


def killed_commit(case: WriteCase, point: CrashPoint, directory: Path) -> str:
    """Return what the abort says after the whole commit was killed at `point`."""
    write = Write(case.make_sink, case.options)
    write.write(range(5), range(5, 9))
    killed_at(point, directory, write.commit_alone)
    with pytest.raises(SinkError) as told:
        write.writer.abort(write.messages)
    return str(told.value)


@pytest.mark.parametrize("point", ["logged", "replied"])
def test_the_error_of_a_killed_commit_says_that_all_is_written_and_how_to_repeat(
    request: pytest.FixtureRequest, tmp_path: Path, point: CrashPoint
) -> None:
    case = sqlite_case(request, tmp_path, "events")
    told = killed_commit(case, point, tmp_path)
    assert "is completely written" in told
    assert "txnAppId=nightly and txnVersion=20260131 is safe" in told
    assert case.ids() == list(range(9))
    again = Write(case.make_sink, case.options)
    again.write(range(9))
    again.commit()
    assert case.ids() == list(range(9))


@pytest.mark.parametrize("point", ["logged", "replied"])
def test_the_error_of_a_killed_commit_without_a_token_forbids_the_repeat(
    request: pytest.FixtureRequest, tmp_path: Path, point: CrashPoint
) -> None:
    case = sqlite_case(request, tmp_path, "events").without_token()
    assert "Do not repeat the write" in killed_commit(case, point, tmp_path)
    assert case.ids() == list(range(9))


def test_the_error_of_a_commit_that_was_killed_before_the_decision_allows_the_repeat(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case = sqlite_case(request, tmp_path, "events").without_token()
    write = Write(case.make_sink, case.options)
    write.write(range(5))
    with pytest.raises(SinkError, match="is not written.*Repeat the write"):
        write.writer.abort(write.messages)
    assert case.ids() == []
    again = Write(case.make_sink, case.options)
    again.write(range(5))
    again.commit()
    assert case.ids() == list(range(5))


def test_the_error_of_a_killed_commit_that_others_have_forgotten_advises_no_repeat(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Without a token a decision is remembered until a later run has decided."""
    case = sqlite_case(request, tmp_path, "events").without_token()
    killed = Write(case.make_sink, case.options)
    killed.write(range(5))
    killed_at("logged", tmp_path, killed.commit_alone)
    for first in (5, 10):
        other = Write(case.make_sink, case.options)
        other.write(range(first, first + 5))
        other.commit_alone()
    with pytest.raises(SinkError, match="it is unknown whether.*Check the target") as told:
        killed.writer.abort(killed.messages)
    assert "repeat this one" not in str(told.value)
    assert case.ids() == list(range(15))


@dataclass(frozen=True)
class KillingSink(OwnSink):
    """Kills the worker in which Spark commits once its rows are there, and the commit itself."""

    def apply(self, transaction: Any, rows: Iterator[pa.RecordBatch]) -> bool:
        applied = super().apply(transaction, rows)
        armed = Path(f"{self.path}.armed")
        if armed.exists():
            armed.unlink()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return applied


@pytest.mark.spark
@pytest.mark.servers
def test_the_error_of_save_tells_what_became_of_the_rows_when_sparks_own_worker_is_killed(
    spark: SparkSession, tmp_path: Path
) -> None:
    spark.dataSource.register(
        connectors.data_source(
            "killing", lambda options: KillingSink(options["path"], table="events", key="id")
        )
    )
    path = tmp_path / "own.db"
    (tmp_path / "own.db.armed").touch()
    options = {"path": str(path), **TOKEN, "staginglocation": str(tmp_path / "staging")}
    with pytest.raises(Exception, match="is completely written") as raised:
        save(spark, options, "killing")
    assert "txnAppId=nightly and txnVersion=20260131 is safe" in str(raised.value)
    assert sqlite_ids(path, "events") == list(range(100))
    save(spark, options, "killing")
    assert sqlite_ids(path, "events") == list(range(100))
