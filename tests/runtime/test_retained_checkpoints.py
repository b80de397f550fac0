"""A job begins from an older checkpoint that its log retains, by the rules of savepoints."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.support.moved_job import (
    assert_all_once,
    copy_job,
    ids_in,
    sqlite_sink,
)

from onceflow import JobState
from onceflow.core.api.pipeline import Job
from onceflow.core.errors import ConfigError, SavepointRefused


def _run_to_four_checkpoints(directory: Path) -> list[int]:
    """Run a job through four checkpoints, of which the log retains three; return their ids then."""
    job = copy_job(directory / "old", sqlite_sink(directory), interval=None, retained=3).start()
    for number in (1, 2, 3, 4):
        job.checkpoint()
        job.wait_for(checkpoints=number)
    job.cancel(60)
    return ids_in(directory)


def _twice(ids: list[int]) -> set[int]:
    return {one for one, count in Counter(ids).items() if count > 1}


def _go_on_and_stop(job: Job, directory: Path, first: list[int]) -> None:
    """Stop once both splits are read further than `first`: from then on nothing comes again."""
    deadline = time.monotonic() + 60
    while min(max(_of_split(ids_in(directory), n)) - max(_of_split(first, n)) for n in (0, 1)) <= 0:
        assert time.monotonic() < deadline, job.status()
        time.sleep(0.02)
    assert job.stop(60).state is JobState.STOPPED


def _of_split(ids: list[int], split: int) -> list[int]:
    return [one for one in ids if one % 2 == split]


@pytest.mark.parametrize("way", ["number", "path"])
def test_an_older_retained_checkpoint_is_begun_from_when_a_rewind_is_allowed(
    tmp_path: Path, way: str
) -> None:
    """Rows committed since are written twice. By default the start is refused."""
    first = _run_to_four_checkpoints(tmp_path)
    place = "3" if way == "number" else str(tmp_path / "old" / "moved" / "chk-3")
    with pytest.raises(SavepointRefused, match=r"checkpoint 3 of job 'moved'.*allow_rewind=True"):
        copy_job(tmp_path / "old", sqlite_sink(tmp_path)).start(from_savepoint=place).wait(60)
    assert ids_in(tmp_path) == first
    pipeline = copy_job(tmp_path / "old", sqlite_sink(tmp_path))
    _go_on_and_stop(pipeline.start(from_savepoint=place, allow_rewind=True), tmp_path, first)
    ids = ids_in(tmp_path)
    assert_all_once(sorted(set(ids)))
    assert set(Counter(ids).values()) == {1, 2}
    assert _twice(ids) <= set(first), "what came twice was committed before"
    # A start that is repeated goes on from the log.
    pipeline = copy_job(tmp_path / "old", sqlite_sink(tmp_path))
    _go_on_and_stop(pipeline.start(from_savepoint=place, allow_rewind=True), tmp_path, first)
    assert _twice(ids_in(tmp_path)) == _twice(ids)


def test_the_last_checkpoint_of_a_job_is_begun_from_in_new_storage(tmp_path: Path) -> None:
    _run_to_four_checkpoints(tmp_path)
    place = str(tmp_path / "old" / "moved" / "chk-4")
    job = copy_job(tmp_path / "new", sqlite_sink(tmp_path)).start(from_savepoint=place)
    job.wait_for(checkpoints=1)
    shutil.rmtree(tmp_path / "old")
    assert job.stop(60).state is JobState.STOPPED
    assert_all_once(ids_in(tmp_path))


def test_an_older_checkpoint_is_begun_from_in_new_storage_when_a_rewind_is_allowed(
    tmp_path: Path,
) -> None:
    first = _run_to_four_checkpoints(tmp_path)
    place = str(tmp_path / "old" / "moved" / "chk-3")
    with pytest.raises(SavepointRefused, match="does not contain the job's decisions"):
        copy_job(tmp_path / "new", sqlite_sink(tmp_path)).start(from_savepoint=place).wait(60)
    pipeline = copy_job(tmp_path / "new", sqlite_sink(tmp_path))
    _go_on_and_stop(pipeline.start(from_savepoint=place, allow_rewind=True), tmp_path, first)
    ids = ids_in(tmp_path)
    assert_all_once(sorted(set(ids)))
    assert set(Counter(ids).values()) == {1, 2}
    assert _twice(ids) <= set(first)


def test_a_checkpoint_that_is_not_retained_is_refused_with_those_that_are(tmp_path: Path) -> None:
    _run_to_four_checkpoints(tmp_path)
    with pytest.raises(SavepointRefused, match=r"checkpoint 1 \(retained: 2, 3, 4\)"):
        copy_job(tmp_path / "old", sqlite_sink(tmp_path)).start(from_savepoint="1").wait(60)
    with pytest.raises(ConfigError, match="omit claim"):
        copy_job(tmp_path / "old", sqlite_sink(tmp_path)).start(from_savepoint="3", claim=True)
