"""Runs the tests of a module with the reader of Kafka that is installed, and with that of objects.

The installed one is the native reader where a compiler was; where none was they are the same.
"""

from __future__ import annotations

from typing import cast

import pytest
from tests.integration import kafka_feed

from onceflow.sources.kafka.intake import why_no_native_client


def require_native() -> None:
    """Skip the test where the package is not installed; it is never needed."""
    why_not = why_no_native_client()
    if why_not is not None:
        pytest.skip(why_not)


@pytest.fixture(params=["installed", pytest.param("objects", marks=pytest.mark.servers)])
def each_reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reader that `kafka_feed.source` asks for, if the format can have it."""
    reader = cast("str", request.param)
    monkeypatch.setattr(kafka_feed, "NATIVE", None if reader == "installed" else False)
    return reader
