"""Nobody else can change what the cache holds and later runs import."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from onceflow.core.local_files import exclusive, is_private, make_private_directory, publish


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the cache of a process that lets everybody write what it creates."""
    monkeypatch.setenv("ONCEFLOW_CACHE", str(tmp_path / "cache"))
    umask = os.umask(0)
    yield tmp_path / "cache"
    os.umask(umask)


def _modes(directory: Path) -> set[int]:
    found = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    return {stat.S_IMODE(path.stat().st_mode) for path in found}


def test_the_cache_is_the_users_alone_whatever_the_umask_says(cache: Path) -> None:
    with publish(cache / "compiled" / "digest") as fresh:
        (fresh / "kernel.py").write_text("x = 1")
    with exclusive(cache / "locks" / "lock", 5):
        pass
    assert _modes(cache) == {0o700}
    assert is_private(cache / "compiled" / "digest")


@pytest.mark.parametrize("opened", ["", "compiled", "compiled/digest"])
def test_a_directory_that_others_can_write_is_not_trusted(cache: Path, opened: str) -> None:
    with publish(cache / "compiled" / "digest"):
        pass
    (cache / opened).chmod(0o777)
    assert not is_private(cache / "compiled" / "digest")


def test_a_directory_that_is_there_keeps_its_modes(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o770)
    make_private_directory(tmp_path / "shared" / "logs")
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o770
    assert stat.S_IMODE((tmp_path / "shared" / "logs").stat().st_mode) == 0o700
