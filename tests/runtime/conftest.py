"""After each test, jobs that have ended well must have left nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support import leftovers

from onceflow.core.runtime.slot.context import AttemptPlan
from onceflow.core.settings.pipeline_settings import RuntimeSettings
from onceflow.integration.conformance.processes import eventually


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path: Path) -> Iterator[None]:
    """Fail a test whose jobs leave files that no checkpoint, savepoint or slot needs.

    In storage: state and staged rows that no checkpoint names, and savepoints that are not whole.
    At the slots: copies of RocksDB databases, and scratch directories of slots that have left.
    """
    scratch = tmp_path / "slots"

    def make_plan(*, settings: RuntimeSettings, **given: Any) -> AttemptPlan:
        # A directory of this test's own: other runs on this machine have slots, too.
        scratch_dir = settings.scratch_dir or str(scratch)
        return AttemptPlan(settings=replace(settings, scratch_dir=scratch_dir), **given)

    # Not the test's own fixture: what it has patched must be undone before the look below.
    with pytest.MonkeyPatch.context() as patch, leftovers.watching_copies(scratch) as copies:
        patch.setattr("onceflow.core.runtime.driver.attempt_start.AttemptPlan", make_plan)
        yield
    assert leftovers.find_leftovers(tmp_path) == []
    # A failed savepoint is reported first, and its files are deleted after that.
    eventually(lambda: leftovers.find_savepoint_leftovers(tmp_path) == [], leftovers.TIDY_S)
    assert leftovers.find_savepoint_leftovers(tmp_path) == []
    assert copies == []
    assert eventually(lambda: not leftovers.find_slot_directories(scratch), leftovers.TIDY_S), (
        leftovers.find_slot_directories(scratch)
    )
