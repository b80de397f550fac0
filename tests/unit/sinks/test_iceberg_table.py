"""A table of Iceberg is asked again after a failure, and deletes files of its own sink id alone."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.types import StringType
from tests.integration.lake_sink_kit import SINK_ID, IcebergJob, one

from onceflow.core.errors import SinkError
from onceflow.core.protocol.committables import Committed, RetryLater
from onceflow.sinks.iceberg.catalogs import TableAddress
from onceflow.sinks.iceberg.table import IcebergTable


class Catalog:
    """A catalog that fails by `error`."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.is_open = True

    def load_table(self, _: object) -> Any:
        raise self.error

    def close(self) -> None:
        self.is_open = False


@pytest.mark.parametrize(
    ("error", "is_missing"),
    [
        (NoSuchTableError("t"), True),
        (NoSuchNamespaceError("n"), True),
        (ConnectionResetError("reset by peer"), False),
        (RuntimeError("the token has expired"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_table_that_cannot_be_asked_for_is_not_missing_and_is_asked_for_anew(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_missing: bool
) -> None:
    opened: list[Catalog] = []

    def open_catalog(_: TableAddress) -> Catalog:
        opened.append(Catalog(error))
        return opened[-1]

    monkeypatch.setattr(TableAddress, "open_catalog", open_catalog)
    table = IcebergTable(TableAddress(("n", "t"), "main", "lake", {}), SINK_ID)
    for _ in range(2):
        if is_missing:
            assert table.find_table() is None
            with pytest.raises(SinkError, match=r"n\.t is not in catalog 'lake'"):
                table.load()
        else:
            with pytest.raises(SinkError, match=r"n\.t cannot be loaded"):
                table.find_table()
    assert [catalog.is_open for catalog in opened] == ([True] if is_missing else [False, False])
    table.close()
    assert not any(catalog.is_open for catalog in opened)


def test_no_file_of_another_sink_id_or_table_is_deleted(tmp_path: Path) -> None:
    job = IcebergJob(tmp_path).open()
    job.prepare(1, one(1))
    (own,) = job.data_files()
    stranger = own.with_name(own.name.replace(own.name.split("-")[0], "stranger"))
    outside = tmp_path / own.name
    for path in (stranger, outside):
        path.write_bytes(b"")
    with job.open_table() as table:
        for path in (stranger, outside):
            with pytest.raises(SinkError, match="damaged"):
                table.delete_files([f"file://{path}"])
        assert stranger.exists()
        assert outside.exists()
        table.delete_files([f"file://{own}"])
    assert not own.exists()


@pytest.mark.parametrize("subtask", [0, 2])
def test_a_column_that_was_created_anew_is_noticed_beside_rows_of_the_new_one(
    tmp_path: Path, subtask: int
) -> None:
    """The rows of one subtask were written before, and those of another one after."""
    job = IcebergJob(tmp_path).open()
    before = job.prepare(1, one(1), subtask=1)
    with job.table() as table, table.update_schema() as update:
        update.delete_column("v")
    with job.table() as table, table.update_schema() as update:
        update.add_column("v", StringType())
    after = job.prepare(1, one(2), subtask=subtask)
    committables = sorted([before, after], key=lambda each: each.transaction)
    outcome = job.commit(1, *committables)
    assert isinstance(outcome, RetryLater)
    assert "column 'v' was dropped and created anew" in outcome.reason
    assert job.rows() == []


def test_files_of_a_table_that_was_replaced_are_not_those_of_the_new_one(tmp_path: Path) -> None:
    job = IcebergJob(tmp_path).open()
    committable = job.prepare(1, one(1))
    parts = job.staging.read(committable.transaction)
    assert parts is not None
    ((_, staged),) = parts
    with job.open_table() as table:
        assert not table.load().refers_to(staged)
        assert table.load().find_loss([staged]) == ""
    assert isinstance(job.commit(1, committable), Committed)
    with job.open_table() as table:
        assert table.load().refers_to(staged)
    job.drop()
    job.open()
    with job.open_table() as table:
        assert not table.load().refers_to(staged)
        assert job.replaced in table.load().find_loss([staged])


def test_a_history_that_was_cut_is_no_loss_though_a_tag_keeps_the_last_commit(
    tmp_path: Path,
) -> None:
    job = IcebergJob(tmp_path).open()
    assert isinstance(job.commit(1, job.prepare(1, one(1))), Committed)
    with job.table() as table:
        kept = table.current_snapshot()
        assert kept is not None
        table.manage_snapshots().create_tag(kept.snapshot_id, "kept").commit()
    job.append(one(2))
    job.append(one(3))
    with job.table() as table:
        table.maintenance.expire_snapshots().older_than(datetime.now(timezone.utc)).commit()
        assert len(table.refresh().snapshots()) == 2
    with job.open_table() as opened:
        assert opened.load().damage == ""


def test_a_file_that_replaces_rows_has_the_name_of_its_checkpoint(tmp_path: Path) -> None:
    """Each file has the name of its checkpoint, so that files of older ones can be removed."""
    job = IcebergJob(tmp_path, write_mode="upsert", primary_key=("id",)).open()
    for checkpoint in (1, 2):
        before = set(job.data_files())
        outcome = job.commit(checkpoint, job.prepare(checkpoint, one(7)))
        assert isinstance(outcome, Committed)
        written = {path.name for path in set(job.data_files()) - before}
        assert written
        assert all(f"-1-{checkpoint}-0-" in name for name in written), written
