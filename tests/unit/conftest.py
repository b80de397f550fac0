"""Fixtures that tests of sinks and of sources share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.schema_registry_double import SchemaRegistryDouble


@pytest.fixture
def registry() -> Iterator[SchemaRegistryDouble]:
    with SchemaRegistryDouble() as double:
        yield double
