"""After each test, jobs that have ended well must have left nothing behind in their storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.leftovers import find_leftovers


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path: Path) -> Iterator[None]:
    """Fail a test whose jobs leave state or staged rows that no checkpoint names."""
    yield
    assert find_leftovers(tmp_path) == []
