"""The HTTP sink of the examples keeps every clause, also when its requests arrive late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import pytest
from examples.http_sink import HttpSink
from tests.support.document_service import DocumentService

from onceflow.core.spi import Sink
from onceflow.integration.conformance import SinkConformance, SinkTarget

_TOKEN = "correct-horse-battery-staple"


class HttpTarget(SinkTarget):
    """The documents of one service."""

    def __init__(self, service: DocumentService) -> None:
        self._service = service

    def sink(self) -> Sink:
        return HttpSink(self._service.url, token=_TOKEN)

    def sink_at(self, host: str, port: int) -> Sink:
        return HttpSink(f"http://{host}:{port}/rows", token=_TOKEN)

    def address(self) -> tuple[str, int]:
        parts = urlsplit(self._service.url)
        return str(parts.hostname), parts.port or 0

    def rows(self) -> list[dict[str, Any]]:
        return self._service.rows()

    def secrets(self) -> Sequence[str]:
        return [_TOKEN]


class TestHttpSink(SinkConformance):
    @pytest.fixture
    def sink_target(self) -> Iterator[SinkTarget]:
        with DocumentService.running() as service:
            yield HttpTarget(service)
