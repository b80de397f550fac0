"""A job that cannot go on ends, and says why: it never stands still and says that it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.clusters import ON_BOTH, AnyCluster
from tests.support.counting_source import SCHEMA, CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import assert_exactly_once, ledger
from tests.support.scripted_sink import ScriptedSink

from onceflow import (
    Checkpointing,
    FileSystemStorage,
    FixedDelay,
    JobState,
    LocalProcesses,
    NoRestart,
    ObjectStorage,
    Pipeline,
    RuntimeSettings,
)
from onceflow.core.errors import CommitFailed, ConfigError, OnceflowError
from onceflow.core.storage.filesystems.filesystem import StorageRefused


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


@ON_BOTH
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (quotes_half_a_pair, r"ValueError: the customer's name is \\ud83d"),
        (returns_half_a_pair, r"'account'.*\\ud83d.* surrogates not allowed"),
        (raises_the_unspeakable, "Unspeakable"),
    ],
)
def test_an_error_that_no_message_can_spell_ends_the_job_by_its_name(
    cluster: AnyCluster, tmp_path: Path, function: Callable[[Any], Any], said: str
) -> None:
    pipeline = Pipeline(
        cluster,
        name="ledger",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=None),
        restart=NoRestart(),
    )
    records = pipeline.read(CountingSource(500), uid="records").map(function, schema=SCHEMA)
    records.write(DirectorySink(str(tmp_path / "out")), uid="ledger")
    with pytest.raises(OnceflowError, match=said) as raised:
        pipeline.run(90)
    str(raised.value).encode()


@pytest.mark.servers
def test_a_recovery_that_outlasts_the_heartbeats_loses_no_slot(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(500)
    slow = ScriptedSink(str(tmp_path / "out"), {"in_doubt": partial(time.sleep, 5)})
    impatient = RuntimeSettings(heartbeat_interval_s=0.2, heartbeat_timeout_s=3.0)
    pipeline, sink = ledger(cluster, tmp_path, source, sink=slow, settings=impatient)
    status = pipeline.run(90)
    assert (status.state, status.restores) == (JobState.FINISHED, 0)
    assert_exactly_once(sink, source)


def test_a_recovery_that_hangs_ends_the_job_and_says_what_it_waits_for(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    hanging = ScriptedSink(str(tmp_path / "out"), {"in_doubt": partial(time.sleep, 60)})
    impatient = RuntimeSettings(commit_deadline_s=1.0, cancel_timeout_s=1.0)
    pipeline, _ = ledger(
        cluster,
        tmp_path,
        CountingSource(500),
        sink=hanging,
        restart=NoRestart(),
        settings=impatient,
    )
    with pytest.raises(CommitFailed, match="waited . s for what sink ledger holds in doubt"):
        pipeline.run(60)


def test_a_first_start_whose_storage_is_refused_ends_at_once_and_says_what_to_do(
    tmp_path: Path,
) -> None:
    (tmp_path / "a file").touch()
    storage = FileSystemStorage(str(tmp_path / "a file" / "checkpoints"))
    source = CountingSource(100)
    for_ever = FixedDelay(attempts=1_000_000, delay_s=0.01)
    pipeline, _ = ledger(LocalProcesses(), tmp_path, source, storage=storage, restart=for_ever)
    with pytest.raises(StorageRefused, match="a file is at the path of a directory"):
        pipeline.run(60)


def test_a_first_start_in_a_bucket_that_cannot_be_used_ends_at_once_and_says_what_to_do(
    tmp_path: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = CountingSource(100)
    for_ever = FixedDelay(attempts=1_000_000, delay_s=0.01)

    def run(url: str) -> None:
        pipeline, _ = ledger(
            LocalProcesses(), tmp_path, source, storage=ObjectStorage(url), restart=for_ever
        )
        pipeline.run(60)

    with pytest.raises(StorageRefused, match="create the bucket"):
        run("s3://there-is-no-such-bucket/checkpoints")
    with pytest.raises((StorageRefused, ConfigError), match="Not_A_Name"):
        run("s3://Not_A_Name/checkpoints")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret-of-this-store")
    with pytest.raises(StorageRefused, match="the secret key does not belong to the access key"):
        run(f"{s3_bucket}/checkpoints")
