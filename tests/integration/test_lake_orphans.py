"""Orphan files of killed writers are removed by age, and no file that anything names is."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
from tests.integration.lake_sink_kit import SINK_ID, DeltaJob, IcebergJob, LakeJob, MakeLakeJob, one

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.committables import Aborted, Committed
from onceflow.sinks import DeltaSink

_DAY_S = 24 * 3600
_LONG_AGO_S = 30 * _DAY_S
"""Above a week, for which Delta keeps what a version has removed."""


@pytest.fixture(params=[IcebergJob, DeltaJob], ids=["iceberg", "delta"])
def make_job(request: pytest.FixtureRequest, tmp_path: Path) -> MakeLakeJob:
    return partial(request.param, tmp_path, remove_orphans_after="3 d")


def leave_orphan(job: LakeJob, number: int, *, attempt: int = 1) -> Path:
    """Write a file as a writer does that is killed before it has described it; return its path."""
    known = set(job.data_files())
    prepared = job.prepare(number, one(number), attempt=attempt, subtask=7)
    job.staging.discard(prepared.transaction)
    (orphan,) = set(job.data_files()) - known
    return orphan


def age_files(job: LakeJob) -> None:
    """Have all data files written a month ago."""
    then = time.time() - _LONG_AGO_S
    for file in job.data_files():
        os.utime(file, (then, then))


def test_old_files_of_earlier_attempts_that_nothing_names_are_deleted_at_a_start(
    make_job: MakeLakeJob,
) -> None:
    job = make_job().open()
    orphan = leave_orphan(job, 8)
    assert job.commit(1, job.prepare(1, one(1))) == Committed()
    age_files(job)
    young = leave_orphan(job, 9)
    job.open(attempt=2)
    assert not orphan.exists()
    assert young.exists(), "it may be a minute old, and of a slot that still writes"
    assert job.ids() == [1]


def test_what_waits_for_its_commit_is_kept_however_old_it_is(make_job: MakeLakeJob) -> None:
    """Gathered checkpoints of a job that was down for a month, and what is to be aborted."""
    job = make_job(commit_checkpoints=100).open()
    gathered = [job.prepare(number, one(number)) for number in (1, 2)]
    undecided = job.prepare(3, one(3))
    age_files(job)
    job.open(attempt=2)
    assert len(job.data_files()) == 3
    assert job.commit(2, *gathered, attempt=2) == Committed()
    with job.committer(2) as committer:
        assert committer.abort(undecided) == Aborted()
    assert job.ids() == [1, 2]


def test_files_that_only_older_versions_have_are_kept_for_their_readers(
    make_job: MakeLakeJob,
) -> None:
    job = make_job().open()
    assert job.commit(1, job.prepare(1, one(1))) == Committed()
    (file,) = job.data_files()
    if isinstance(job, IcebergJob):
        with job.table() as table:
            table.delete("id = 1")
    else:
        from deltalake import DeltaTable

        assert isinstance(job, DeltaJob)
        DeltaTable(job.path).delete("id = 1")
    age_files(job)
    job.open(attempt=2)
    assert job.ids() == []
    assert file.exists()


def test_files_of_other_sink_ids_and_programs_are_never_deleted(make_job: MakeLakeJob) -> None:
    """They may wait for commits that this job cannot know of."""
    job = make_job().open()
    orphan = leave_orphan(job, 8)
    names = [
        orphan.name.replace(SINK_ID, f"x-onceflow-{SINK_ID}"),
        orphan.name.replace(SINK_ID, "another"),
        orphan.name.replace(f"{SINK_ID}-1-", f"{SINK_ID}-2-"),
        "part-00000.parquet",
    ]
    others = [orphan.rename(orphan.with_name(names[0]))]
    others += [Path(orphan.parent, name) for name in names[1:]]
    for other in others[1:]:
        other.write_bytes(others[0].read_bytes())
    age_files(job)
    job.open(attempt=2)
    assert all(other.exists() for other in others)


@pytest.mark.servers
def test_descriptions_that_cannot_be_read_keep_every_file(
    make_job: MakeLakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job().open()
    orphan = leave_orphan(job, 8)
    job.prepare(1, one(1))
    (description,) = (job.directory / "staging").rglob("*.arrow")
    description.write_bytes(description.read_bytes()[:-1])
    age_files(job)
    job.open(attempt=2)
    assert orphan.exists()
    assert "orphan files are left" in caplog.text


@pytest.mark.parametrize(
    ("age", "message"), [("soon", "is not a duration"), ("59 min", "at least 3600 seconds")]
)
def test_an_age_that_is_none_or_too_short_is_refused_by_name(age: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"remove_orphans_after='{age}'.*{message}"):
        DeltaSink("/data/t", remove_orphans_after=age)
