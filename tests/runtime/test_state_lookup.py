"""State of a running job is looked up by key: in Python, and over its endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.spark_formats import state_job
from tests.support.counting_source import amount_of
from typer.testing import CliRunner

from onceflow import HeapBackend, RocksDBBackend
from onceflow.cli.main import app
from onceflow.core.api.pipeline import Job
from onceflow.core.errors import ConfigError


@pytest.fixture(scope="module", params=["heap", "rocksdb"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Job, Path]]:
    """A job that has read everything and goes on; and its directory."""
    directory = tmp_path_factory.mktemp(request.param)
    job = state_job.start(directory, HeapBackend() if request.param == "heap" else RocksDBBackend())
    try:
        state_job.await_all_records_in_a_checkpoint(job)
        yield job, directory
    finally:
        job.cancel()


def get(directory: Path, *words: str) -> tuple[int, dict[str, Any]]:
    storage = ["--storage", str(directory / "checkpoints")]
    result = CliRunner().invoke(app, ["state", "get", "remembers", *storage, "--json", *words])
    return result.exit_code, json.loads(result.stdout.splitlines()[-1])


def test_a_key_of_every_kind_of_state_is_looked_up_and_the_answer_says_as_of_when(
    running: tuple[Job, Path],
) -> None:
    job, directory = running
    ids = list(range(7, state_job.RECORDS, state_job.ACCOUNTS))
    last = job.look_up("remembers", "7", state="last")
    assert (last.found, last.as_of, last.kind) == (True, "checkpoint", "value")
    assert last.value in {amount_of(number) for number in ids}
    assert set(job.look_up("remembers", "7", state="ids").value) == set(ids)
    days = dict(job.look_up("remembers", "7", state="days").value)
    assert sum(days.values()) == sum(map(amount_of, ids))
    key = ("7", amount_of(7))
    n = sum(amount_of(number) == amount_of(7) for number in ids)
    assert job.look_up("totals", key).value["n"] == n
    status, found = get(directory, "--uid", "totals", "--key", key[0], "--key", str(key[1]))
    assert (status, found["key"], found["value"]["n"]) == (0, list(key), n)
    assert found["checkpoint"] <= job.status().history[-1].checkpoint
    status, found = get(directory, "--uid", "remembers", "--state", "ids", "--key", "7")
    assert (status, found["as_of"], set(found["value"])) == (0, "checkpoint", set(ids))


def test_what_cannot_be_looked_up_is_told_with_what_comes_nearest(
    running: tuple[Job, Path],
) -> None:
    job, directory = running
    with pytest.raises(ConfigError, match="no operator 'total': did you mean 'totals'"):
        job.look_up("total", "7")
    with pytest.raises(ConfigError, match="no state 'las': did you mean 'last'"):
        job.look_up("remembers", "7", state="las")
    assert not job.look_up("remembers", "nobody", state="last").found
    assert get(directory, "--uid", "remembers", "--state", "last", "--key", "nobody")[0] == 1
    status, found = get(directory, "--uid", "remembers", "--key", "7")
    assert status == 1
    assert "several states, or none: there: 'days', 'ids', 'last', 'seen'" in found["error"]
