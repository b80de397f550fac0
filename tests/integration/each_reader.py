"""Runs the tests of a module with each reader of Kafka: by objects, and natively."""

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


@pytest.fixture(params=["objects", "native"])
def each_reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reader that `kafka_feed.source` asks for, if the format can have it."""
    reader = cast("str", request.param)
    if reader == "native":
        require_native()
    monkeypatch.setattr(kafka_feed, "NATIVE", None if reader == "native" else False)
    return reader
