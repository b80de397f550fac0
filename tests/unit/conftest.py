"""Fixtures that tests of sinks and of sources share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.schema_registry_double import SchemaRegistryDouble


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SchemaRegistryDouble]:
    # Its address begins with http, but each client of Confluent's would read all root certificates.
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    with SchemaRegistryDouble() as double:
        yield double
