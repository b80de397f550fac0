"""Rows of the file sink are there once after a power cut at any moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.integration.file_sink_kit import FileJob, rows, seen_ids
from tests.integration.sink_kit import SCHEMA
from tests.support.power_cuts import CutFailed, Record, cut_at_each_moment, do_nothing

from onceflow.core.protocol.committables import AlreadyCommitted, Committable, Committed
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi.sink import WriterContext
from onceflow.core.storage.filesystems.local import LocalFileSystem
from onceflow.sinks import FileSink
from onceflow.sinks.files.checkpoint_files import CheckpointFiles

IDS = {1: list(range(4)), 2: [4]}
"""The rows of each checkpoint, in three partitions and in one."""


def open_job(root: Path) -> FileJob:
    return FileJob(FileSink(str(root / "lake" / "rows"), partition_by=("account",)))


def run_job(disk: Record) -> None:
    with open_job(disk.root) as job:
        committer = job.check().committer()
        for checkpoint, ids in IDS.items():
            committable = job.prepare(checkpoint, ids)
            disk.promise(f"{checkpoint} is pre-committed")
            assert committer.commit(committable) == Committed()
            disk.promise(f"{checkpoint} is committed")


def check_rows(root: Path, promises: frozenset[str]) -> None:
    committed = [number for number in IDS if f"{number} is committed" in promises]
    prepared = [number for number in IDS if f"{number} is pre-committed" in promises]
    seen = seen_ids(root / "lake" / "rows")
    assert len(seen) == len(set(seen))
    assert set(seen) >= {row for number in committed for row in IDS[number]}
    with open_job(root) as job:
        committer = job.check(attempt=2).committer(attempt=2)
        for number in prepared:
            transaction = TransactionId(job.sink_id, 1, number, 0)
            outcome = committer.commit(Committable(transaction, len(IDS[number])))
            assert isinstance(outcome, Committed | AlreadyCommitted), outcome
        # A transaction without a pre-commit was never decided, so recovery rolls it back.
        decided = {TransactionId(job.sink_id, 1, number, 0) for number in prepared}
        for committable in committer.in_doubt():
            if committable.transaction not in decided:
                committer.abort(committable)
        assert committer.in_doubt() == ()
    assert seen_ids(root / "lake" / "rows") == [row for number in prepared for row in IDS[number]]


def test_rows_are_there_once_after_each_cut(tmp_path: Path) -> None:
    assert cut_at_each_moment(tmp_path, run_job, check_rows) > 100


def checkpoint_files(root: Path) -> CheckpointFiles:
    return CheckpointFiles(root / "files" / "of sink", "job.files", "parquet")


def pre_commit_file(disk: Record) -> None:
    job = open_job(disk.root)
    files = checkpoint_files(disk.root)
    files.open(job.committer_context())
    context = WriterContext(
        *("job", "out", job.sink_id, 0, 1),
        attempt=AttemptId(1),
        first_checkpoint=CheckpointId(1),
        schema=SCHEMA,
    )
    writer = files.writer(context, pq.ParquetWriter)
    writer.write(rows(IDS[1]))
    writer.pre_commit(CheckpointId(1))
    disk.promise("pre-committed")


def check_file(root: Path, promises: frozenset[str]) -> None:
    files = checkpoint_files(root)
    found = [files.path(committable.transaction) for committable in files.list_files()]
    # Each file with a name is whole.
    contents = [pq.ParquetFile(path).read().column("id").to_pylist() for path in found]
    assert contents in ([], [IDS[1]])
    assert contents or not promises


def test_the_file_of_a_pre_commit_is_there_after_each_cut(tmp_path: Path) -> None:
    assert cut_at_each_moment(tmp_path, pre_commit_file, check_file) > 5


def _sync_no_names(disk: Record, call: str, path: str, sync: Any = Record.sync) -> None:
    if not Path(path).is_dir():
        sync(disk, call, path)


@pytest.mark.parametrize("unsynced", ["names", "public names"])
def test_names_that_are_not_synced_break_a_promise(
    tmp_path: Path, unsynced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if unsynced == "names":
        monkeypatch.setattr(Record, "sync", _sync_no_names)
    else:
        monkeypatch.setattr(LocalFileSystem, "make_names_durable", do_nothing)
    with pytest.raises(CutFailed):
        cut_at_each_moment(tmp_path, run_job, check_rows)
