"""Tests that a bad address of a collector and a missing SDK are refused when a job is built."""

from __future__ import annotations

import sys

import pytest

from onceflow.core.errors import ConfigError
from onceflow.core.runtime.metrics.exposition import Measured
from onceflow.core.runtime.metrics.open_telemetry import TelemetrySender
from onceflow.core.settings.configuration import Configuration
from onceflow.core.settings.pipeline_settings import OpenTelemetry


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "localhost"])
def test_an_address_that_is_no_url_is_refused_by_name(endpoint: str) -> None:
    environment = {"ONCEFLOW_OTEL_ENDPOINT": endpoint}
    with pytest.raises(ConfigError, match=r"otel\.endpoint=.*ONCEFLOW_OTEL_ENDPOINT"):
        Configuration.load(environment=environment).check()


def test_an_interval_is_over_zero() -> None:
    with pytest.raises(ConfigError, match="metrics_interval"):
        OpenTelemetry("http://collector:4318", 0)
    assert OpenTelemetry("http://collector:4318").parse_interval_s() == 30.0


def test_without_the_sdk_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    settings = OpenTelemetry("http://collector:4318")
    with pytest.raises(ConfigError, match=r"onceflow\[otel\]"):
        TelemetrySender("ledger", settings, 200, lambda: Measured(()))
