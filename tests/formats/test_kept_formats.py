"""Tests that data of each released version is read by every later one: see docs/versions.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.formats.kept_job import KeptJob
from tests.formats.write import KEPT
from tests.support.archives import unpack_tar

from onceflow import JobState

VERSIONS = sorted(path.name for path in KEPT.iterdir())


def unpack(version: str, end: str, backend: str, directory: Path) -> KeptJob:
    unpack_tar(KEPT / version / f"{end}-{backend}.tar.xz", directory)
    return KeptJob(directory, backend)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_that_an_older_version_was_killed_in_goes_on_and_writes_every_row_once(
    tmp_path: Path, version: str, backend: str
) -> None:
    kept = unpack(version, "killed", backend, tmp_path)
    before = kept.query("SELECT count(*) FROM balances")
    kept.read_all.touch()
    status = kept.pipeline().run(90)
    assert status.state is JobState.FINISHED
    assert kept.query("SELECT count(*) FROM balances") != before
    kept.assert_every_row_is_there_once()


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_savepoint_of_an_older_version_is_gone_on_from_in_new_storage(
    tmp_path: Path, version: str, backend: str
) -> None:
    kept = unpack(version, "stopped", backend, tmp_path)
    kept.read_all.touch()
    job = kept.pipeline(storage="new").start(from_savepoint=str(kept.savepoint))
    assert job.wait(90).state is JobState.FINISHED
    kept.assert_every_row_is_there_once()
