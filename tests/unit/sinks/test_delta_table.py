"""A version of a Delta table tells what was lost, and a commit's version is whole for readers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.integration.lake_sink_kit import SINK_ID, DeltaJob, one

from onceflow.core.protocol.committables import Committable, Committed, RetryLater
from onceflow.sinks.delta import table as tables
from onceflow.sinks.delta.table import DeltaVersion


@pytest.fixture
def job(tmp_path: Path) -> DeltaJob:
    return DeltaJob(tmp_path).open()


def read_log(job: DeltaJob, version: int) -> list[dict[str, Any]]:
    path = job.path / "_delta_log" / f"{version:020}.json"
    return [json.loads(line) for line in path.read_text().splitlines()]


def load(job: DeltaJob) -> DeltaVersion:
    with job.open_table() as opened:
        version = opened.load()
    assert isinstance(version, DeltaVersion)
    return version


def test_a_version_says_that_its_files_change_the_data_and_when_they_were_added(
    job: DeltaJob,
) -> None:
    """Readers of changes leave out files that change nothing."""
    began_ms = time.time() * 1000
    committable = job.prepare(1, one(1))
    assert isinstance(job.commit(1, committable), Committed)
    (add,) = [
        line["add"] for line in read_log(job, DeltaTable(job.path).version()) if "add" in line
    ]
    assert add["dataChange"] is True
    assert began_ms - 1 <= add["modificationTime"] <= time.time() * 1000
    assert job.ids() == [1]


def test_rules_that_a_table_has_got_meanwhile_refuse_rows_that_were_not_checked_for_them(
    job: DeltaJob,
) -> None:
    assert load(job).refusal == ""
    committable = job.prepare(1, one(1))
    DeltaTable(job.path).alter.add_constraint({"small": "id < 1"})
    assert "has rules that the sink does not check: delta.constraints.small" in load(job).refusal
    outcome = job.commit(1, committable)
    assert isinstance(outcome, RetryLater)
    assert "First remove the rules from the table" in outcome.reason
    assert outcome.until_fixed
    assert job.ids() == []


def history(*commits: tuple[int, str, int | None]) -> list[Mapping[str, Any]]:
    """Return commits (version, operation, restored version), the newest first."""
    return [
        {
            "version": version,
            "operation": operation,
            "operationParameters": {} if restored is None else {"version": str(restored)},
        }
        for version, operation, restored in sorted(commits, reverse=True)
    ]


@pytest.mark.parametrize(
    ("commits", "harm"),
    [
        ([(5, "WRITE", None), (6, "WRITE", None)], None),
        ([(5, "WRITE", None), (6, "RESTORE", 5)], None),
        ([(5, "WRITE", None), (6, "RESTORE", 4)], 6),
        # A restore that another one takes back does no harm.
        ([(5, "WRITE", None), (6, "RESTORE", 3), (7, "RESTORE", 5)], None),
        ([(5, "WRITE", None), (6, "RESTORE", 3), (7, "WRITE", None), (8, "RESTORE", 7)], 6),
        ([(5, "WRITE", None), (6, "WRITE", None), (7, "RESTORE", 6), (8, "RESTORE", 2)], 7),
        # The version of a restore by time is not known.
        ([(5, "WRITE", None), (6, "RESTORE", None)], 6),
        ([(4, "RESTORE", 1), (5, "WRITE", None)], None),
    ],
)
def test_a_restore_harms_if_the_newest_state_does_not_come_from_the_last_commit(
    commits: list[tuple[int, str, int | None]], harm: int | None
) -> None:
    find = tables._find_restore_beyond  # pyright: ignore[reportPrivateUsage]
    assert find(5, history(*commits)) == harm


def test_rows_that_a_restore_has_removed_are_told_and_no_others_are(job: DeltaJob) -> None:
    assert load(job).damage == ""
    assert isinstance(job.commit(1, job.prepare(1, one(1))), Committed)
    before = DeltaTable(job.path).version()
    job.append(one(2))
    assert isinstance(job.commit(2, job.prepare(2, one(3))), Committed)
    assert load(job).damage == ""
    DeltaTable(job.path).restore(before)
    damage = load(job).damage
    assert f"{SINK_ID!r} had committed checkpoint 2, so committed rows of the job may" in damage
    DeltaTable(job.path).restore(before + 2)
    assert load(job).damage == ""


def read_batch(job: DeltaJob, committable: Committable) -> pa.RecordBatch:
    parts = job.staging.read(committable.transaction)
    assert parts is not None
    ((_, batch),) = parts
    return batch


def test_files_of_another_table_or_that_are_gone_are_a_loss(job: DeltaJob) -> None:
    first, second = job.prepare(1, one(1)), job.prepare(2, one(2))
    staged = [read_batch(job, each) for each in (first, second)]
    version = load(job)
    assert version.find_loss(staged) == ""
    assert not version.refers_to(staged[0])
    assert isinstance(job.commit(1, first), Committed)
    version = load(job)
    assert version.is_committed(first.transaction)
    assert not version.is_committed(second.transaction)
    assert version.refers_to(staged[0])
    assert not version.refers_to(staged[1])
    names = {path.name for path in job.data_files()}
    assert len(names) == 2
    with job.open_table() as opened:
        (waiting,) = opened.list_paths(staged[1])
    (job.path / waiting).unlink()
    assert version.find_loss(staged) == f"{version.location}: data file {waiting} is gone"
    job.drop()
    job.open()
    other = load(job)
    assert "that table was deleted, and another one" in other.find_loss(staged)
    assert not other.refers_to(staged[0])


def test_a_claim_alone_adds_no_file(job: DeltaJob) -> None:
    before = DeltaTable(job.path).version()
    job.open(2)
    version = load(job)
    assert version.record is not None
    assert (version.record.attempt, version.record.through) == (2, 0)
    assert DeltaTable(job.path).version() == before + 1
    assert not any("add" in line for line in read_log(job, before + 1))
    assert version.append((), version.record, ()) == 0
