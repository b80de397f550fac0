"""The list of errors in the reference has every error that a user can meet, by name."""

from __future__ import annotations

import inspect
from pathlib import Path

from onceflow.core import errors
from onceflow.core.errors import CheckpointError, OnceflowError
from onceflow.core.storage.filesystems.filesystem import StorageRefused

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
_ROOTS = {OnceflowError, CheckpointError}
"""Never raised themselves."""


def test_the_index_of_errors_names_every_error_that_a_user_can_meet() -> None:
    index = _PAGE.read_text()
    raised = {
        member
        for member in vars(errors).values()
        if inspect.isclass(member) and issubclass(member, OnceflowError)
    }
    wanted = {one.__name__ for one in ({*raised, StorageRefused} - _ROOTS)}
    assert sorted(name for name in wanted if f"`{name}`" not in index) == []
