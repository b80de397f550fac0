"""Drivers that race for one log, and storage that changes under its readers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from tests.unit.storage.storage_samples import decision

from onceflow.core.errors import CheckpointCorrupt, Fenced, StorageError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.log.rules import AttemptClaimed, LogView, next_claim
from onceflow.core.storage import DecisionLog, DecisionUnknown, FileSystemStorage, JobStorage
from onceflow.core.storage.filesystems.local import LocalFileSystem
from onceflow.core.storage.layout import JobPaths
from onceflow.core.storage.log import decision_log


@pytest.fixture
def storage(tmp_path: Path) -> JobStorage:
    return FileSystemStorage(str(tmp_path)).open("ledger")


def test_a_driver_that_was_fenced_once_decides_nothing_more_whatever_is_deleted(
    storage: JobStorage, tmp_path: Path
) -> None:
    """A decision of it beside that of the newer driver would commit rows twice."""
    older = storage.log.claim("driver")
    older.append(decision(0, 1))
    storage.log.claim("driver")
    with pytest.raises(Fenced, match="attempt 1 is fenced"):
        older.append(decision(1, 1))
    (tmp_path / "ledger/log/000000000003.json").unlink()
    with pytest.raises(Fenced, match="attempt 1 is fenced"):
        older.append(decision(1, 1))
    assert storage.log.read().completed == (decision(0, 1),)


@pytest.mark.parametrize("is_recreated", [False, True], ids=["moved", "emptied"])
def test_a_driver_whose_storage_was_moved_away_names_that_and_no_other_driver(
    storage: JobStorage, tmp_path: Path, is_recreated: bool
) -> None:
    log = storage.log.claim("driver")
    log.append(decision(0, 1))
    (tmp_path / "ledger").rename(tmp_path / "away")
    if is_recreated:
        (tmp_path / "ledger/log").mkdir(parents=True)
    for step in (log.check_owned, log.claim_again):
        with pytest.raises(
            CheckpointCorrupt, match="no other driver has claimed the job"
        ) as caught:
            step()
        assert "Two drivers" not in str(caught.value)
    shutil.rmtree(tmp_path / "ledger", ignore_errors=True)
    (tmp_path / "away").rename(tmp_path / "ledger")
    assert log.claim_again().attempt == 2


def test_a_driver_whose_storage_was_replaced_by_an_older_copy_names_that(
    storage: JobStorage, tmp_path: Path
) -> None:
    first = storage.log.claim("driver")
    shutil.copytree(tmp_path / "ledger", tmp_path / "copy")
    second = first.claim_again()
    shutil.rmtree(tmp_path / "ledger")
    (tmp_path / "copy").rename(tmp_path / "ledger")
    with pytest.raises(CheckpointCorrupt, match="lacks the claim of attempt 2"):
        second.check_owned()


def test_a_driver_that_loses_every_race_ends_and_leaves_the_job_to_the_others(
    storage: JobStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "CLAIM_TRIES_MAX", 4)
    claims = 0

    def be_late(view: LogView) -> AttemptClaimed:
        nonlocal claims
        claims += 1
        storage.log.claim("faster")
        return next_claim(view, "slower")

    with pytest.raises(Fenced, match="4 times another driver claimed the job first"):
        storage.log.claim_by(be_late)
    assert claims == 4
    view = storage.log.read()
    assert view.attempt == 4
    assert view.owner.startswith("faster")


class ListsMore(LocalFileSystem):
    """Lists a record that is gone when it is read, as a pruned one is."""

    def list(self, directory: str) -> tuple[str, ...]:
        return (*super().list(directory), "000000000009.json")


def test_a_reader_whose_log_changes_all_the_time_ends_with_an_error(tmp_path: Path) -> None:
    FileSystemStorage(str(tmp_path)).open("ledger").log.claim("driver")
    log = DecisionLog(ListsMore(str(tmp_path)), JobPaths("ledger"))
    with pytest.raises(StorageError, match="changed 64 times while it was read"):
        log.read()


class ChangesOnce(LocalFileSystem):
    """Lists the log as it is in the middle of a change; from then on, as it is."""

    change: Callable[[set[str]], set[str]] | None = None

    def list(self, directory: str) -> tuple[str, ...]:
        names = super().list(directory)
        change, self.change = self.change, None
        return tuple(sorted(change(set(names)))) if change else names


def list_deleted(names: set[str]) -> set[str]:
    return names | {"000000000009.json"}


def miss_one(names: set[str]) -> set[str]:
    return names - {"000000000002.json"}


@pytest.mark.parametrize("change", [list_deleted, miss_one])
def test_a_log_that_changes_while_it_is_read_is_read_again(
    storage: JobStorage, tmp_path: Path, change: Callable[[set[str]], set[str]]
) -> None:
    log = storage.log.claim("driver")
    for number in range(2):
        log.append(decision(number, 1))
    files = ChangesOnce(str(tmp_path))
    files.change = change
    assert DecisionLog(files, JobPaths("ledger")).read() == log.view
    assert files.change is None


class ListsLate(LocalFileSystem):
    """Leaves the newest record out of listings."""

    def list(self, directory: str) -> tuple[str, ...]:
        names = super().list(directory)
        return names[:-1] if directory.endswith("log") else names


def test_a_claim_that_storage_does_not_list_is_not_taken_for_a_claim(tmp_path: Path) -> None:
    log = DecisionLog(ListsLate(str(tmp_path)), JobPaths("ledger"))
    with pytest.raises(DecisionUnknown, match="use storage with list-after-write"):
        log.claim("driver")


def test_a_log_of_which_only_the_first_record_was_pruned_never_starts_over(
    storage: JobStorage, tmp_path: Path
) -> None:
    log = storage.log.claim("driver")
    log.append(decision(0, 1))
    log.prune(CheckpointId(0))
    (tmp_path / "ledger/log/000000000002.json").unlink()
    with pytest.raises(
        CheckpointCorrupt, match="Starting over would lose rows or write them twice"
    ):
        storage.log.claim("driver")


def test_the_last_write_of_a_log_is_the_time_of_its_last_record(
    storage: JobStorage, tmp_path: Path
) -> None:
    assert storage.log.find_last_write_time() is None
    storage.log.claim("driver").append(decision(0, 1))
    os.utime(tmp_path / "ledger/log/000000000001.json", (0, 0))
    written = storage.log.find_last_write_time()
    assert written is not None
    assert abs(datetime.now(timezone.utc) - written) < timedelta(minutes=5)
