"""Savepoints that are asked for while the job ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.core.protocol.checkpoints.decisions import CheckpointKind, StateForm
from onceflow.core.runtime.driver.savepoints import Savepoints
from onceflow.core.storage import FileSystemStorage


def test_a_savepoint_may_be_asked_for_while_the_last_one_gets_its_proofs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FileSystemStorage(str(tmp_path))
    savepoints = Savepoints("ledger", storage, storage.open("ledger"), None, "heap", 60.0)
    last = savepoints.ask(CheckpointKind.SAVEPOINT_STOP, None, StateForm.CANONICAL)
    written: Any = SimpleNamespace(completed=None, memory=None)
    last.written = written
    copied: list[object] = []

    def copy_staged(asked: object, *_: object) -> None:
        copied.append(asked)
        savepoints.ask(CheckpointKind.SAVEPOINT, None, StateForm.CANONICAL)

    monkeypatch.setattr(savepoints, "_copy_staged", copy_staged)
    savepoints.add_proofs()
    assert copied == [last]
    savepoints.fail_all("the job has ended")
