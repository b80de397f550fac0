from __future__ import annotations

import errno
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.unit.storage.storage_samples import killed_at_each_step

from onceflow.core.errors import StorageError
from onceflow.core.storage.filesystems import filesystem, local
from onceflow.core.storage.filesystems.local import LocalFileSystem

WHOLE = b"whole " * 1000


@pytest.fixture
def fs(tmp_path: Path) -> LocalFileSystem:
    return LocalFileSystem(str(tmp_path / "root"))


def fail_with(code: int) -> Callable[..., None]:
    def failing(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return failing


# --- creation -------------------------------------------------------------------------------------


CREATE_AND_DIE = """
from onceflow.core.storage.filesystems.local import LocalFileSystem

def prepare(root):
    fs = LocalFileSystem(root)
    fs.make_directory("log")
    if sys.argv[2] == "create":
        return lambda: fs.create_if_absent("log/1", b"whole " * 1000)
    return lambda: fs.write("log/1", (b"whole " * 500,) * 2)

killed_at_each_step(prepare, ("open", "write", "fsync", "close", "link", "unlink", "replace"))
"""


@pytest.mark.parametrize("how", ["create", "write"])
def test_a_writer_killed_at_any_step_leaves_the_whole_file_or_none(
    tmp_path: Path, how: str
) -> None:
    """Kills a real process before and after each system call that publication makes."""
    seen: set[bytes | None] = set()
    found: bytes | None = None
    statuses = killed_at_each_step(CREATE_AND_DIE, tmp_path, how)
    for step, status in enumerate(statuses, start=1):
        fs = LocalFileSystem(str(tmp_path / str(step)))
        found = fs.read("log/1")
        assert found in {None, WHOLE}, f"killed at step {step}: {found!r}"
        assert fs.list("log") == (("1",) if found else ())
        assert status == 0 or len(fs.list_unfinished("log")) <= 1
        again = fs.create_if_absent("log/1", b"successor")
        assert again == (filesystem.AlreadyExists(WHOLE) if found else filesystem.Created())
        seen.add(found)
    assert found == WHOLE
    assert seen == {None, WHOLE}
    assert len(statuses) > (16 if how == "create" else 8)


@pytest.mark.parametrize(
    "code", sorted({errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT})
)
def test_a_link_that_surely_did_nothing_is_a_plain_failure(
    fs: LocalFileSystem, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fs.make_directory("log")
    monkeypatch.setattr(os, "link", fail_with(code))
    with pytest.raises(StorageError) as raised:
        fs.create_if_absent("log/1", b"data")
    assert not isinstance(raised.value, filesystem.CreationUnknown)
    monkeypatch.undo()
    assert fs.list("log") == ()
    assert fs.list_unfinished("log") == ()


def test_a_link_that_may_have_worked_is_unknown_and_found_by_asking_again(
    fs: LocalFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system can do the link, and lose the reply."""
    fs.make_directory("log")
    link = os.link

    def replies_are_lost(source: str, target: str) -> None:
        link(source, target)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", replies_are_lost)
    with pytest.raises(filesystem.CreationUnknown, match="log/1"):
        fs.create_if_absent("log/1", b"data")
    monkeypatch.undo()
    assert fs.create_if_absent("log/1", b"data") == filesystem.AlreadyExists(b"data")


def test_a_name_that_may_not_survive_a_crash_is_unknown(
    fs: LocalFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.create_if_absent("log/0", b"")
    fsync = os.fsync
    fails = True

    def directories_fail(descriptor: int) -> None:
        if fails and os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", directories_fail)
    with pytest.raises(filesystem.CreationUnknown, match="cannot make durable"):
        fs.create_if_absent("log/1", b"data")
    with pytest.raises(filesystem.CreationUnknown, match="cannot make durable"):
        fs.create_if_absent("log/1", b"data")  # whoever finds it does not know either
    fails = False
    assert fs.create_if_absent("log/1", b"data") == filesystem.AlreadyExists(b"data")


@pytest.mark.parametrize("how", ["write", "adopt"])
def test_a_file_whose_name_may_not_survive_is_taken_away_again(
    fs: LocalFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (tmp_path / "source").write_bytes(WHOLE)
    fs.write("shared/other", (b"",))

    def failing(full: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), full)

    monkeypatch.setattr(local, "sync_directory", failing)
    with pytest.raises(StorageError, match="shared/f"):
        if how == "write":
            fs.write("shared/f", (WHOLE,))
        else:
            fs.adopt("shared/f", tmp_path / "source")
    assert fs.list("shared") == ("other",)


def test_nothing_is_shown_before_its_bytes_are_synced(
    fs: LocalFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.create_if_absent("log/0", b"")
    calls: list[str] = []
    for name in ("fsync", "link", "replace"):
        real = getattr(os, name)

        def recorded(
            *arguments: object, real: Callable[..., None] = real, name: str = name
        ) -> None:
            directory = name == "fsync" and os.path.isdir(f"/proc/self/fd/{arguments[0]}")  # noqa: PTH112
            calls.append("fsync directory" if directory else name)
            real(*arguments)

        monkeypatch.setattr(os, name, recorded)
    fs.create_if_absent("log/1", b"data")
    assert calls == ["fsync", "link", "fsync directory"]
    calls.clear()
    fs.write("log/2", (b"data",))
    assert calls == ["fsync", "replace", "fsync directory"]


# --- writing and reading --------------------------------------------------------------------------


def test_an_adopted_link_brings_the_file_and_not_the_link(
    fs: LocalFileSystem, tmp_path: Path
) -> None:
    (tmp_path / "target").write_bytes(WHOLE)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert fs.adopt("shared/f", tmp_path / "link")
    (tmp_path / "target").unlink()
    assert fs.read("shared/f") == WHOLE


def test_a_file_of_another_disk_is_not_adopted(tmp_path: Path) -> None:
    # Memory, or the disk of the environment, is another file system than that of the test.
    others = [
        directory
        for directory in (Path("/dev/shm"), Path(sys.prefix))
        if os.access(directory, os.W_OK) and directory.stat().st_dev != tmp_path.stat().st_dev
    ]
    if not others:
        pytest.skip("no second file system that may be written")
    fs = LocalFileSystem(str(tmp_path))
    with tempfile.NamedTemporaryFile(dir=others[0], prefix=".onceflow-test-") as source:
        source.write(WHOLE)
        source.flush()
        assert not fs.adopt("shared/f", Path(source.name))
    assert fs.list("shared") == ()


def test_a_missing_source_cannot_be_adopted(fs: LocalFileSystem, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="shared/f"):
        fs.adopt("shared/f", tmp_path / "gone")


def test_temporary_files_are_listed_apart_with_the_name_they_were_to_have(
    fs: LocalFileSystem, tmp_path: Path
) -> None:
    fs.write("log/000000000001.json", (b"",))
    name = f".000000000002.json.{'0' * 32}.tmp"
    (tmp_path / "root/log" / name).write_bytes(b"half")
    assert fs.list("log") == ("000000000001.json",)
    assert fs.list_unfinished("log") == (filesystem.Unfinished(name, "000000000002.json"),)


def test_a_tree_is_deleted_under_a_writer_that_goes_on(fs: LocalFileSystem) -> None:
    """The writer of a dead attempt does not know; what it leaves, a later sweep finds."""
    stop = threading.Event()

    def keep_writing() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            # Its directory may be gone between the file and the file's name; it is told so.
            with suppress(StorageError):
                fs.write(f"chk-1/a1/{number}", (b"late",))

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        for _ in range(20):
            try:
                fs.delete_tree("chk-1")
            except StorageError as error:
                assert "keeps adding" in str(error)  # noqa: PT017
    finally:
        stop.set()
        writer.join()
    fs.delete_tree("chk-1")
    assert fs.list("") == ()


def test_a_root_below_missing_directories_is_made_durably(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()

    def recorded(full: str) -> None:
        synced.add(full)

    monkeypatch.setattr(local, "sync_directory", recorded)
    LocalFileSystem(str(tmp_path / "a/b")).make_directory("job/log")
    here = str(tmp_path)
    assert synced == {here, f"{here}/a", f"{here}/a/b", f"{here}/a/b/job"}


def test_the_memory_of_directories_is_bounded(
    fs: LocalFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "DIRECTORIES_KNOWN_MAX", 2)
    for number in range(7):
        fs.write(f"chk-{number}/f", (b"",))
    assert len(fs._known) <= 2  # pyright: ignore[reportPrivateUsage]


def test_a_write_fails_if_the_early_sync_of_its_last_bytes_fails(
    fs: LocalFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reports the failure once, so the last sync of the file would succeed."""
    monkeypatch.setattr(local, "SYNC_BYTES", 4)
    monkeypatch.setattr(os, "fdatasync", fail_with(errno.EIO))
    with pytest.raises(StorageError, match=os.strerror(errno.EIO)):
        fs.write("state", [b"12345678"])
    assert not fs.list("")
    assert not fs.list_unfinished("")
