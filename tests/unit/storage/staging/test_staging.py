"""Staged rows: whole or nothing, found by name from any process, and never silently wrong."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from onceflow.core.errors import StateCorrupt, StorageError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi.staging import is_staged
from onceflow.core.storage import FileStagingArea
from onceflow.core.storage.filesystems.local import LocalFileSystem
from onceflow.core.storage.staging import staged_rows as staging_module

SINK = "Job.ledger"


def transaction(checkpoint: int, *, attempt: int = 1, subtask: int = 0) -> TransactionId:
    return TransactionId(SINK, attempt, checkpoint, subtask)


def area_in(path: Path) -> FileStagingArea:
    return FileStagingArea.in_directory(str(path), SINK)


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(values, pa.int64())})


def sealed(area: FileStagingArea, name: TransactionId, *values: int) -> None:
    rows = area.open()
    rows.write(batch(*values))
    try:
        rows.seal(name)
    finally:
        rows.close()


def test_sealed_rows_are_read_back_in_order_with_their_parts(tmp_path: Path) -> None:
    rows = area_in(tmp_path).open()
    other = pa.record_batch({"name": ["x"]})
    rows.write(batch(1, 2), part="orders")
    rows.write(other, part="customers")
    rows.write(batch(3), part="orders")
    assert rows.rows == 4
    committable = rows.seal(transaction(7))
    assert committable.rows == 4
    assert is_staged(committable)
    # Another process has nothing but the description.
    again = pickle.loads(pickle.dumps(area_in(tmp_path)))
    found = again.read(transaction(7))
    assert found is not None
    assert [(part, got.to_pydict()) for part, got in found] == [
        ("orders", {"id": [1, 2]}),
        ("customers", {"name": ["x"]}),
        ("orders", {"id": [3]}),
    ]


def test_rows_larger_than_the_memory_bound_go_through_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_module, "MEMORY_BYTES_MAX", 1000)
    sealed(area_in(tmp_path), transaction(1), *range(10_000))
    found = area_in(tmp_path).read(transaction(1))
    assert found is not None
    assert [got["id"].to_pylist() for _, got in found] == [list(range(10_000))]


def test_only_what_is_sealed_is_listed_oldest_first(tmp_path: Path) -> None:
    area = area_in(tmp_path)
    assert area.transactions() == []
    sealed(area, transaction(12), 1)
    sealed(area, transaction(3, subtask=1), 1)
    unsealed = area.open()
    unsealed.write(batch(9))
    assert area.transactions() == [transaction(3, subtask=1), transaction(12)]
    unsealed.close()
    assert area.contains(transaction(12))
    assert not area.contains(transaction(13))


def test_another_sinks_rows_are_not_listed(tmp_path: Path) -> None:
    sealed(area_in(tmp_path), transaction(1), 1)
    assert FileStagingArea.in_directory(str(tmp_path), "job.ledger").transactions() == []


def test_discarded_rows_are_gone_and_discarding_twice_is_fine(tmp_path: Path) -> None:
    area = area_in(tmp_path)
    sealed(area, transaction(1), 1)
    area.discard(transaction(1))
    area.discard(transaction(1))
    assert area.read(transaction(1)) is None
    assert area.transactions() == []


def test_a_name_in_use_is_refused_and_keeps_its_rows(tmp_path: Path) -> None:
    area = area_in(tmp_path)
    sealed(area, transaction(1), 1)
    with pytest.raises(StorageError, match="already staged under Job.ledger/1/1/0/0"):
        sealed(area, transaction(1), 2)
    found = area.read(transaction(1))
    assert found is not None
    assert [got["id"].to_pylist() for _, got in found] == [[1]]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_damage_is_refused_before_the_first_row(tmp_path: Path, damage: str) -> None:
    area = area_in(tmp_path)
    sealed(area, transaction(1), *range(100))
    file = tmp_path / area.path(transaction(1))
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    damaged: dict[str, bytes | bytearray] = {"cut": data[:-30], "flip": data, "empty": b""}
    file.write_bytes(damaged[damage])
    with pytest.raises(StateCorrupt, match=r"1-1-0-0\.arrow"):
        area.read(transaction(1))


def test_what_is_staged_is_copied_whole_and_known_as_imported(tmp_path: Path) -> None:
    job, kept, moved = (area_in(tmp_path / name) for name in ("job", "kept", "moved"))
    for number in (1, 2, 3):
        sealed(job, transaction(number), number)
    assert job.copy_to(kept, lambda one: one.checkpoint <= 2) == (transaction(1), transaction(2))
    assert moved.import_from(kept) == (transaction(1), transaction(2))
    assert moved.import_from(kept) == (transaction(1), transaction(2)), "again, after a crash"
    sealed(moved, transaction(4), 4)
    assert [moved.is_imported(transaction(number)) for number in (1, 2, 4)] == [True, True, False]
    assert not job.is_imported(transaction(1))
    assert moved.transactions() == [transaction(1), transaction(2), transaction(4)]
    found = moved.read(transaction(2))
    assert found is not None
    assert [got["id"].to_pylist() for _, got in found] == [[2]]


def test_a_proof_that_takes_the_place_of_rows_while_they_are_copied_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A committer writes its proof and deletes the rows, after the first look and before a copy."""
    job, kept = area_in(tmp_path / "job"), area_in(tmp_path / "kept")
    sealed(job, transaction(1), 1)
    proof = transaction(1, subtask=9)
    read_chunks = type(job.fs).read_chunks

    def committed_before(fs: LocalFileSystem, path: str) -> Iterator[bytes] | None:
        if job.contains(transaction(1)):
            sealed(job, proof, 0)
            job.discard(transaction(1))
        return read_chunks(fs, path)

    monkeypatch.setattr(type(job.fs), "read_chunks", committed_before)
    assert job.copy_to(kept, lambda _: True) == (proof,)


@pytest.mark.parametrize("damage", ["cut", "altered", "emptied"])
def test_damaged_rows_are_not_copied(tmp_path: Path, damage: str) -> None:
    job, kept = area_in(tmp_path / "job"), area_in(tmp_path / "kept")
    sealed(job, transaction(1), *range(100))
    path = Path(job.fs.location(job.path(transaction(1))))
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-3], "altered": b"\xff" + data[1:], "emptied": b""}[damage])
    with pytest.raises(StateCorrupt, match="damaged"):
        job.copy_to(kept, lambda _: True)
    assert kept.transactions() == []
