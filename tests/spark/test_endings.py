"""A job that cannot go on ends, and says why: it never stands still and says that it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.support.counting_source import SCHEMA, CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import assert_exactly_once

from onceflow import Checkpointing, JobState, NoRestart, Pipeline, RuntimeSettings, count, sum_
from onceflow.core.errors import CommitFailed, OnceflowError
from onceflow.core.protocol.committables import Committable
from onceflow.core.spi import Committer, CommitterContext

pytestmark = pytest.mark.spark


class Unspeakable(Exception):
    """An error that fails when it is asked for its text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def quotes_half_a_pair(record: dict[str, Any]) -> dict[str, Any]:
    raise ValueError(json.loads('"the customer\'s name is \\ud83d"'))


def returns_half_a_pair(record: dict[str, Any]) -> dict[str, Any]:
    return record | {"account": json.loads('"\\ud83d"')}


def raises_the_unspeakable(record: dict[str, Any]) -> dict[str, Any]:
    raise Unspeakable


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (quotes_half_a_pair, r"ValueError: the customer's name is \\ud83d"),
        (returns_half_a_pair, r"'account'.*\\ud83d.* surrogates not allowed"),
        (raises_the_unspeakable, "Unspeakable"),
    ],
)
def test_an_error_that_no_message_can_spell_ends_the_job_by_its_name(
    spark: SparkSession, tmp_path: Path, function: Callable[[Any], Any], said: str
) -> None:
    pipeline = Pipeline(
        spark,
        name="ledger",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=None),
        restart=NoRestart(),
    )
    records = pipeline.read(CountingSource(500), uid="records").map(function, schema=SCHEMA)
    records.write(DirectorySink(str(tmp_path / "out")), uid="ledger")
    with pytest.raises(OnceflowError, match=said) as raised:
        pipeline.run(30)
    str(raised.value).encode()


@dataclass(frozen=True)
class SlowToRecover(DirectorySink):
    """A directory that takes `seconds` to say what it holds in doubt."""

    seconds: float = 0.0

    def committer(self, context: CommitterContext) -> Committer:
        return _Slow(super().committer(context), self.seconds)


class _Slow(Committer):
    def __init__(self, committer: Committer, seconds: float) -> None:
        self.commit = committer.commit  # type: ignore[method-assign]
        self.abort = committer.abort  # type: ignore[method-assign]
        self.close = committer.close  # type: ignore[method-assign]
        self._in_doubt = committer.in_doubt
        self._seconds = seconds

    def commit(self, committable: Committable) -> Any: ...

    def abort(self, committable: Committable) -> Any: ...

    def in_doubt(self) -> Sequence[Committable]:
        time.sleep(self._seconds)
        return self._in_doubt()

    def close(self) -> None: ...


def test_a_recovery_that_outlasts_the_heartbeats_loses_no_slot(
    spark: SparkSession, tmp_path: Path
) -> None:
    source = CountingSource(500)
    sink = SlowToRecover(str(tmp_path / "out"), seconds=3.0)
    pipeline = Pipeline(
        spark,
        name="ledger",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
        restart=NoRestart(),
        settings=RuntimeSettings(heartbeat_interval_s=0.2, heartbeat_timeout_s=1.5),
    )
    records = pipeline.read(source, uid="records").key_by("account")
    records.running(balance=sum_("amount"), n=count(), uid="balance").write(sink, uid="ledger")
    assert pipeline.run(30).state is JobState.FINISHED
    assert_exactly_once(sink, source)


def test_a_recovery_that_hangs_ends_the_job_and_says_what_it_waits_for(
    spark: SparkSession, tmp_path: Path
) -> None:
    sink = SlowToRecover(str(tmp_path / "out"), seconds=60.0)
    pipeline = Pipeline(
        spark,
        name="ledger",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
        restart=NoRestart(),
        settings=RuntimeSettings(commit_deadline_s=1.0, cancel_timeout_s=1.0),
    )
    pipeline.read(CountingSource(500), uid="records").write(sink, uid="ledger")
    with pytest.raises(CommitFailed, match="waited . s for what sink ledger holds in doubt"):
        pipeline.run(20)
