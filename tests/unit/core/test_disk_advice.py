"""Errors of code that writes working files tell how much space the disk has left."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from onceflow.core.errors import StateError
from onceflow.core.local_files import advise_on_disk, naming_full_disk


def test_a_directory_that_is_not_there_yet_is_on_the_disk_of_its_parent(tmp_path: Path) -> None:
    advice = advise_on_disk(tmp_path / "not" / "yet")
    assert advice.startswith(f"the disk of {tmp_path} has ")
    assert "RocksDBBackend(directory=…)" in advice


def test_a_path_that_cannot_be_examined_is_on_the_disk_of_its_parent(tmp_path: Path) -> None:
    # The system refuses to look at a name of this length, as it does below a locked directory.
    advice = advise_on_disk(tmp_path / ("x" * 300) / "rocksdb")
    assert advice.startswith(f"the disk of {tmp_path} has ")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_only_a_disk_without_room_is_named(tmp_path: Path, number: int) -> None:
    with (
        pytest.raises(StateError, match=r"the state cannot be restored in .*; the disk of "),
        naming_full_disk(tmp_path, "the state cannot be restored"),
    ):
        raise OSError(number, "no room")
    with pytest.raises(PermissionError), naming_full_disk(tmp_path, "the state"):
        raise PermissionError(errno.EACCES, "refused")
