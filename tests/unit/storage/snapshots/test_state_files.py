from __future__ import annotations

import errno
import importlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.storage.storage_samples import finish, start_python
from typing_extensions import Buffer

from onceflow.core.errors import BadStateValue, CheckpointCorrupt, InvariantViolation, StorageError
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.state.api.context import StateReader, StateWriter
from onceflow.core.storage import FileSystemStorage, JobStorage
from onceflow.core.storage.snapshots.state_files import FileStateWriter

BIG = bytes(range(256)) * 400
ARROW: Any = importlib.import_module("pyarrow")  # has no types


@pytest.fixture
def storage(tmp_path: Path) -> JobStorage:
    return FileSystemStorage(str(tmp_path / "storage")).open("ledger")


def writer_of(storage: JobStorage, uid: str = "balance", checkpoint: int = 1) -> FileStateWriter:
    return storage.writer(AttemptId(2), CheckpointId(checkpoint), uid, 3)


def reader_of(storage: JobStorage) -> StateReader:
    return storage.reader()


def as_the_backends_see_it(storage: JobStorage) -> StateWriter:
    """Type-checks only if the writer is what `core.state` asks for."""
    return writer_of(storage)


def file_of(tmp_path: Path, handle: StateHandle) -> Path:
    return tmp_path / "storage/ledger" / handle.path


def test_state_is_read_back_in_another_process_of_the_job(
    storage: JobStorage, tmp_path: Path
) -> None:
    handle = writer_of(storage).write("keyed", BIG, key_groups=range(16, 32))
    assert handle == StateHandle(
        "keyed",
        "chk-1/a2/balance@3@keyed",
        len(BIG),
        xxhash.xxh3_128_hexdigest(BIG),
        16,
        31,
    )
    script = """
import sys
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.storage import FileSystemStorage
handle = StateHandle(*sys.argv[2:4], int(sys.argv[4]), sys.argv[5])
data = FileSystemStorage(sys.argv[1]).open("ledger").reader().read(handle)
print(data == bytes(range(256)) * 400)
"""
    process = start_python(
        script,
        str(tmp_path / "storage"),
        handle.name,
        handle.path,
        str(handle.size_bytes),
        handle.checksum,
    )
    assert finish(process)[:2] == (0, "True\n")


@pytest.mark.parametrize("size_bytes", [0, 1, 19_999])
def test_small_state_is_inside_the_handle_and_no_file(
    storage: JobStorage, tmp_path: Path, size_bytes: int
) -> None:
    handle = writer_of(storage).write("keyed", BIG[:size_bytes])
    assert (handle.path, handle.inline, handle.size_bytes) == ("", BIG[:size_bytes], size_bytes)
    assert (handle.key_group_first, handle.key_group_last) == (0, -1)
    assert reader_of(storage).read(handle) == BIG[:size_bytes]
    assert not (tmp_path / "storage").exists()


def test_state_at_the_threshold_is_a_file(storage: JobStorage, tmp_path: Path) -> None:
    handle = writer_of(storage).write("keyed", BIG[:20_000])
    assert handle.inline == b""
    assert file_of(tmp_path, handle).read_bytes() == BIG[:20_000]


@pytest.mark.parametrize("threshold_bytes", [0, 1])
def test_with_a_low_threshold_even_a_byte_is_a_file(tmp_path: Path, threshold_bytes: int) -> None:
    description = FileSystemStorage(str(tmp_path), inline_threshold_bytes=threshold_bytes)
    handle = writer_of(description.open("ledger")).write("keyed", b"x")
    assert (tmp_path / "ledger" / handle.path).read_bytes() == b"x"


@pytest.mark.parametrize(
    "data",
    [BIG, bytearray(BIG), memoryview(BIG), ARROW.py_buffer(BIG), memoryview(BIG).cast("Q")],
    ids=["bytes", "bytearray", "memoryview", "arrow", "memoryview of integers"],
)
def test_every_kind_of_buffer_is_written_as_its_bytes(storage: JobStorage, data: Buffer) -> None:
    handle = writer_of(storage).write("keyed", data)
    assert (handle.size_bytes, reader_of(storage).read(handle)) == (len(BIG), BIG)


@pytest.mark.parametrize("size_bytes", [0, 19_999, 20_000, len(BIG)])
def test_state_written_in_chunks_has_the_handle_of_the_same_state_written_at_once(
    storage: JobStorage, size_bytes: int
) -> None:
    data = BIG[:size_bytes]
    chunks = (ARROW.py_buffer(data[at : at + 7_000]) for at in range(0, size_bytes, 7_000))
    chunked = writer_of(storage).write_chunks("keyed", chunks, key_groups=range(16, 32))
    whole = writer_of(storage).write("keyed", data, key_groups=range(16, 32))
    assert chunked == whole
    assert reader_of(storage).read(chunked) == data


def test_chunks_that_fail_on_the_way_leave_no_file(storage: JobStorage, tmp_path: Path) -> None:
    def chunks() -> Iterator[pa.Buffer]:
        yield ARROW.py_buffer(BIG)
        raise BadStateValue("the next one cannot be encoded")

    writer = writer_of(storage)
    with pytest.raises(BadStateValue, match="the next one"):
        writer.write_chunks("keyed", chunks())
    assert [path for path in (tmp_path / "storage").rglob("*") if path.is_file()] == []
    writer.abandon()


def test_a_disk_that_loses_the_beginning_of_a_long_file_fails_its_write(
    storage: JobStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "lost")

    # The last sync succeeds, for Linux has told the descriptor of the failure already.
    monkeypatch.setattr(os, "fdatasync", fail)
    chunk = ARROW.py_buffer(bytes(1 << 20))
    with pytest.raises(StorageError, match="lost"):
        writer_of(storage).write_chunks("keyed", [chunk] * 20)
    assert [path for path in (tmp_path / "storage").rglob("*") if path.is_file()] == []


@settings(max_examples=30, deadline=None)
@given(uid=st.text(min_size=1), name=st.text(min_size=1))
def test_unusual_names_are_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, uid: str, name: str
) -> None:
    storage = FileSystemStorage(str(tmp_path_factory.mktemp("names"))).open("ledger")
    one = writer_of(storage, uid).write(name, BIG)
    other = writer_of(storage, uid + "x").write(name, BIG[::-1])
    assert one.name == name
    assert reader_of(storage).read(one) == BIG
    assert reader_of(storage).read(other) == BIG[::-1]


@pytest.mark.parametrize("name", ["../../escape", "a/b", "a@b", "Ü", " ", "x" * 500, "-rf", "\n"])
def test_a_name_never_leads_out_of_the_checkpoint(
    storage: JobStorage, tmp_path: Path, name: str
) -> None:
    handle = writer_of(storage, uid=name).write(name, BIG)
    assert file_of(tmp_path, handle).resolve().parent == tmp_path / "storage/ledger/chk-1/a2"
    assert reader_of(storage).read(handle) == BIG


def test_one_name_cannot_be_written_twice(storage: JobStorage) -> None:
    writer = writer_of(storage)
    writer.write("keyed", BIG)
    with pytest.raises(InvariantViolation, match="written twice"):
        writer.write("keyed", BIG)


@pytest.mark.parametrize("groups", [range(0), range(4, 4), range(0, 8, 2)])
def test_an_impossible_range_of_key_groups_is_refused(storage: JobStorage, groups: range) -> None:
    with pytest.raises(InvariantViolation, match="not a range of key groups"):
        writer_of(storage).write("keyed", b"x", key_groups=groups)


# --- files ----------------------------------------------------------------------------------------


def test_a_private_file_is_a_copy_that_outlives_changes_of_its_source(
    storage: JobStorage, tmp_path: Path
) -> None:
    source = tmp_path / "MANIFEST"
    source.write_bytes(BIG)
    handle = writer_of(storage).write_file("MANIFEST", source, shared=False)
    source.write_bytes(b"changed")
    assert not handle.shared
    assert reader_of(storage).read(handle) == BIG


def test_a_small_private_file_is_inside_the_handle(storage: JobStorage, tmp_path: Path) -> None:
    (tmp_path / "CURRENT").write_bytes(b"MANIFEST-000004\n")
    handle = writer_of(storage).write_file("CURRENT", tmp_path / "CURRENT", shared=False)
    assert (handle.path, handle.inline) == ("", b"MANIFEST-000004\n")


@pytest.mark.parametrize("size_bytes", [0, 10, len(BIG), 5 << 20])
def test_a_shared_file_is_a_file_of_its_own_name_whatever_its_size(
    storage: JobStorage, tmp_path: Path, size_bytes: int
) -> None:
    data = os.urandom(size_bytes)
    source = tmp_path / "000012.sst"
    source.write_bytes(data)
    writer = writer_of(storage)
    first = writer.write_file("000012.sst", source, shared=True, key_groups=range(8))
    second = writer_of(storage, checkpoint=2).write_file("000012.sst", source, shared=True)
    source.unlink()
    assert first.shared
    assert writer.uploaded_bytes == size_bytes, "new in storage, whether copied or linked"
    assert first.path.startswith("shared/a2@balance@3@")
    assert first.path != second.path, "a name is used once, ever"
    assert (first.size_bytes, first.checksum) == (size_bytes, xxhash.xxh3_128_hexdigest(data))
    target = tmp_path / "restored.sst"
    reader_of(storage).read_to(first, target)
    assert target.read_bytes() == data


def test_a_shared_file_on_another_disk_is_copied(
    storage: JobStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "000012.sst"
    source.write_bytes(BIG)

    def other_disk(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", other_disk)
    handle = writer_of(storage).write_file("000012.sst", source, shared=True)
    assert handle.shared
    assert file_of(tmp_path, handle).stat().st_ino != source.stat().st_ino
    assert reader_of(storage).read(handle) == BIG


def test_a_restored_file_can_be_changed_without_changing_the_checkpoint(
    storage: JobStorage, tmp_path: Path
) -> None:
    source = tmp_path / "000012.sst"
    source.write_bytes(BIG)
    handle = writer_of(storage).write_file("000012.sst", source, shared=True)
    target = tmp_path / "restored.sst"
    reader_of(storage).read_to(handle, target)
    target.write_bytes(b"changed")
    assert reader_of(storage).read(handle) == BIG


@pytest.mark.parametrize("shared", [True, False])
def test_a_missing_source_is_named(storage: JobStorage, tmp_path: Path, *, shared: bool) -> None:
    with pytest.raises(StorageError, match="gone"):
        writer_of(storage).write_file("gone", tmp_path / "gone", shared=shared)


def test_what_was_written_for_a_checkpoint_to_be_declined_can_be_taken_back(
    storage: JobStorage, tmp_path: Path
) -> None:
    (tmp_path / "000012.sst").write_bytes(BIG)
    writer = storage.writer(AttemptId(2), CheckpointId(1), "balance", 3)
    writer.write("keyed", BIG)
    writer.write_file("000012.sst", tmp_path / "000012.sst", shared=True)
    writer.abandon()
    writer.abandon()
    assert not [path for path in (tmp_path / "storage").rglob("*") if path.is_file()]


WRITE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.storage import FileSystemStorage
storage = FileSystemStorage(sys.argv[1]).open("ledger")
writer = storage.writer(AttemptId(1), CheckpointId(1), "u", 0)
writer.write("keyed", bytes(range(256)) * 400)
handle = writer.write_file("f.sst", Path(sys.argv[2]), shared=True)
print(handle.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_state_whose_handle_was_returned_survives_the_process(tmp_path: Path) -> None:
    (tmp_path / "f.sst").write_bytes(BIG)
    storage = FileSystemStorage(str(tmp_path / "s"))
    code, out, err = finish(start_python(WRITE_AND_DIE, storage.root, str(tmp_path / "f.sst")))
    assert code == -signal.SIGKILL, err
    checksum = xxhash.xxh3_128_hexdigest(BIG)
    reader = storage.open("ledger").reader()
    for path in ("chk-1/a1/u@0@keyed", out.strip()):
        assert reader.read(StateHandle("n", path, len(BIG), checksum)) == BIG


# --- damage ---------------------------------------------------------------------------------------


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "first bit": lambda data: flipped(data, 0),
    "middle bit": lambda data: flipped(data, len(data) // 2),
    "last bit": lambda data: flipped(data, len(data) - 1),
    "cut": lambda data: data[:-1],
    "empty": lambda _: b"",
    "longer": lambda data: data + b"\0",
    "swapped": lambda data: data[::-1],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("shared", [True, False])
def test_damaged_state_is_refused_with_its_file_and_both_checksums(
    storage: JobStorage, tmp_path: Path, damage: str, *, shared: bool
) -> None:
    (tmp_path / "source").write_bytes(BIG)
    handle = writer_of(storage).write_file("f", tmp_path / "source", shared=shared)
    path = file_of(tmp_path, handle)
    damaged = DAMAGES[damage](BIG)
    path.write_bytes(damaged)
    target = tmp_path / "target"
    for read in (
        lambda: reader_of(storage).read(handle),
        lambda: reader_of(storage).read_to(handle, target),
    ):
        with pytest.raises(CheckpointCorrupt) as raised:
            read()
        message = str(raised.value)
        assert all(
            part in message
            for part in (str(path), handle.checksum, xxhash.xxh3_128_hexdigest(damaged), "backup")
        )
    assert not target.exists(), "nothing of damaged state is left to be used"


def test_missing_state_is_refused_by_name(storage: JobStorage, tmp_path: Path) -> None:
    handle = writer_of(storage).write("keyed", BIG)
    file_of(tmp_path, handle).unlink()
    with pytest.raises(CheckpointCorrupt, match=r"balance@3@keyed .* is gone"):
        reader_of(storage).read(handle)
    with pytest.raises(CheckpointCorrupt, match=r"balance@3@keyed .* is gone"):
        reader_of(storage).read_to(handle, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_damaged_inline_state_is_refused(storage: JobStorage) -> None:
    good = writer_of(storage).write("keyed", b"small")
    bad = StateHandle(good.name, "", good.size_bytes, good.checksum, inline=b"smalm")
    with pytest.raises(CheckpointCorrupt, match="inside the decision log of job ledger"):
        reader_of(storage).read(bad)


def test_a_restore_never_overwrites_a_file(storage: JobStorage, tmp_path: Path) -> None:
    handle = writer_of(storage).write("keyed", BIG)
    (tmp_path / "target").write_bytes(b"mine")
    with pytest.raises(StorageError, match=r"cannot restore state keyed to .*target: File exists"):
        reader_of(storage).read_to(handle, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"mine"
