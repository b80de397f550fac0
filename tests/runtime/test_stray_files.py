"""Files in checkpoint storage that are no job's refuse no job and no command."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
from tests.runtime.test_job_commands import asked, run
from tests.support.counting_source import CountingSource
from tests.support.ledger import assert_exactly_once, ledger

from onceflow import JobState, LocalProcesses, NoRestart
from onceflow.core.errors import StorageError
from onceflow.core.storage import FileSystemStorage

SOURCE = CountingSource(400)


def _make_unreadable(monkeypatch: pytest.MonkeyPatch, *directories: Path) -> None:
    """Make listing `directories` fail as the system does for users who are not root."""
    list_directory = os.listdir

    def refuse_or_list(path: str) -> list[str]:
        for directory in directories:
            if Path(path) == directory or directory in Path(path).parents:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return list_directory(path)

    for directory in directories:
        directory.mkdir(parents=True)
    monkeypatch.setattr(os, "listdir", refuse_or_list)


def test_a_job_starts_and_is_listed_beside_files_and_directories_that_are_no_job(
    cluster: LocalProcesses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = tmp_path / "checkpoints"
    _make_unreadable(monkeypatch, root / "lost+found", root / "backups")
    for name in ("README", "README.md", ".nfs000000000123", "notes"):
        (root / name).write_text("not a job")
    (root / "old" / "log").mkdir(parents=True)
    (root / "old" / "log" / ".nfs000000000456").touch()
    pipeline, sink = ledger(cluster, tmp_path, SOURCE, restart=NoRestart())
    with caplog.at_level(logging.WARNING):
        assert pipeline.run(60).state is JobState.FINISHED
        assert [job["job"] for job in asked(tmp_path, "list")["jobs"]] == ["ledger"]
        status, listed, error = run(tmp_path, "checkpoints list", "--json")
    assert (status, '"kind": "checkpoint"' in listed) == (0, True), error
    assert_exactly_once(sink, SOURCE)
    warnings = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert any(f"{root}/backups" in text and "Permission denied" in text for text in warnings)
    assert not any("README" in text or "lost+found" in text for text in warnings)


def test_a_job_whose_own_directory_cannot_be_read_is_refused_by_name(
    cluster: LocalProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "checkpoints" / "ledger"
    _make_unreadable(monkeypatch, own)
    pipeline, _ = ledger(cluster, tmp_path, SOURCE)
    with pytest.raises(StorageError, match=f"{own}/.*: Permission denied"):
        pipeline.run(60)
    status, _, error = run(tmp_path, "status")
    assert status != 0
    assert f"{own}/log: Permission denied" in " ".join(error.split())


def test_a_job_goes_on_beside_files_that_are_not_its_own_in_its_directories(
    cluster: LocalProcesses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, sink = ledger(cluster, tmp_path, CountingSource(200), restart=NoRestart())
    first.run(60)
    own = tmp_path / "checkpoints" / "ledger"
    for directory in ("", "log", "shared", "staged", "savepoints", "probe", "chk-77", "inputs"):
        (own / directory).mkdir(exist_ok=True)
        for name in ("README", "notes.txt", ".nfs000000000123"):
            (own / directory / name).write_text("not of the job")
    (own / "chk-78").write_text("a file with the name of a checkpoint's directory")
    _make_unreadable(monkeypatch, own / "lost+found", own / "chk-79")
    # Nothing more is read, but the attempt restores, sweeps, and ends with a checkpoint of its own.
    again, _ = ledger(cluster, tmp_path, SOURCE, restart=NoRestart())
    assert again.run(60).state is JobState.FINISHED
    assert f"{own}/chk-79: Permission denied" in caplog.text
    status, listed, error = run(tmp_path, "checkpoints list", "--json")
    assert (status, '"kind": "checkpoint"' in listed) == (0, True), error
    assert "README" not in error
    assert sink.prepared() == []
    assert (own / "shared" / "README").exists()
    assert (own / "chk-77" / "notes.txt").exists()


def test_one_damaged_savepoint_does_not_hide_the_others(
    cluster: LocalProcesses, tmp_path: Path
) -> None:
    source = CountingSource(400, pause_s=0.002, ends_with=str(tmp_path / "read all"))
    pipeline, _ = ledger(cluster, tmp_path, source, restart=NoRestart())
    job = pipeline.start()
    kept, damaged = job.savepoint(), job.savepoint()
    job.stop()
    (Path(damaged) / "_metadata").write_bytes(b"not metadata")
    status, listed, error = run(tmp_path, "checkpoints list", "--json")
    assert status == 0, error
    assert (kept in listed, damaged in listed) == (True, False)
    assert damaged in error.replace("\n", "")


def test_a_log_directory_with_stray_files_alone_belongs_to_no_job(tmp_path: Path) -> None:
    log = tmp_path / "old" / "log"
    log.mkdir(parents=True)
    (log / ".nfs000000000456").touch()
    assert FileSystemStorage(str(tmp_path)).open("_").jobs() == ()
    assert FileSystemStorage(str(tmp_path)).open("old").log_id, "a new job may take the name"
