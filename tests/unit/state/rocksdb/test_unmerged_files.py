"""A copy waits for merges, so that files do not pile up, but neither for ever nor in vain."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from onceflow.core.state.rocksdb import database as module
from onceflow.core.state.rocksdb.database import Database, DatabaseOptions


class _Busy:
    """A RocksDB that has `counts` unmerged files, one after the other; the last for ever."""

    def __init__(self, *counts: int, failures: int = 0) -> None:
        self.counts, self.failures = list(counts), failures
        self.copied_at = -1

    def property_int_value(self, name: str) -> int:
        if name == "rocksdb.background-errors":
            return self.failures
        return self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]


class _Checkpoint:
    def __init__(self, busy: _Busy) -> None:
        self._busy = busy

    def create_checkpoint(self, path: str) -> None:
        del path
        self._busy.copied_at = self._busy.counts[0]


def _copy(busy: _Busy, directory: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the time in seconds that a copy of `busy` takes."""
    database = Database(directory / "rocksdb", DatabaseOptions(1 << 20, 1 << 20))
    database.close()
    monkeypatch.setattr(database, "_database", busy)
    monkeypatch.setattr(module, "Checkpoint", _Checkpoint)
    began = time.monotonic()
    database.link_to(directory / "copy")
    return time.monotonic() - began


def test_a_copy_waits_until_merges_have_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = _Busy(25, 25, 20, 19)
    _copy(busy, tmp_path, monkeypatch)
    assert busy.copied_at == 19


def test_a_copy_does_not_wait_once_a_merge_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = _Busy(25, failures=1)
    assert _copy(busy, tmp_path, monkeypatch) < 5
    assert busy.copied_at == 25


def test_a_copy_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MERGE_WAIT_S", 0.1)
    busy = _Busy(25)
    assert 0.1 <= _copy(busy, tmp_path, monkeypatch) < 5
    assert busy.copied_at == 25
