"""Both spellings of a duration are taken everywhere: seconds, and text with a unit."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from typing_extensions import assert_type

import onceflow
from onceflow import (
    Checkpointing,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    RuntimeSettings,
    sinks,
    sources,
)
from onceflow.core.errors import ConfigError
from onceflow.core.settings import pipeline_settings
from onceflow.core.spi import Sink, Source
from onceflow.core.spi.lookups import LookupSource
from onceflow.sinks import KafkaSink, MySQLSink, PostgresSink, SQLiteSink
from onceflow.sources import KafkaSource, MySQLTable, PostgresChanges, PostgresTable

NEEDED: dict[type, dict[str, Any]] = {
    ExponentialDelay: {"max_delay_s": 7200.0},
    FailureRate: {},
    FixedDelay: {},
    RuntimeSettings: {"heartbeat_timeout_s": 30000.0},
    KafkaSink: {"bootstrap_servers": "127.0.0.1:1", "topic": "payments"},
    KafkaSource: {"bootstrap_servers": "127.0.0.1:1", "topic": "payments", "schema": "id BIGINT"},
    MySQLSink: {"url": "mysql://u@127.0.0.1/db", "table": "t"},
    MySQLTable: {"url": "mysql://u@127.0.0.1/db", "table": "t"},
    PostgresSink: {"url": "postgresql://u@127.0.0.1/db", "table": "t"},
    PostgresChanges: {"url": "postgresql://u@127.0.0.1/db", "table": "t"},
    PostgresTable: {"url": "postgresql://u@127.0.0.1/db", "table": "t"},
    SQLiteSink: {"url": "sqlite:////tmp/db", "table": "t"},
}
"""What users build, and the settings without which they cannot, or a bound would be crossed."""
TOLD = {
    "AttemptStats",
    "CheckpointFailure",
    "JobRestarting",
    "JobStatus",
    "Moment",
    "SinkStatus",
    "SlotStatus",
}
"""What onceflow itself builds for its users to read."""


def _durations(settings: type) -> list[str]:
    return [field.name for field in fields(settings) if field.init and field.name.endswith("_s")]


OF_SERVERS = (LookupSource, Sink, Source)
CASES = [(settings, name) for settings in NEEDED for name in _durations(settings)]


def test_every_public_setting_in_seconds_is_a_case() -> None:
    public = {
        name: value
        for module in (onceflow, sinks, sources)
        for name in module.__all__
        if isinstance(value := getattr(module, name), type) and is_dataclass(value)
    }
    with_durations = {name for name, value in public.items() if _durations(value)}
    assert with_durations - TOLD == {settings.__name__ for settings in NEEDED}


@pytest.mark.parametrize(("settings", "name"), CASES)
def test_text_is_taken_as_the_same_seconds(settings: type, name: str) -> None:
    needed = {key: value for key, value in NEEDED[settings].items() if key != name}
    by_text = settings(**needed, **{name: "1500 min" if "timeout" in name else "15 s"})
    by_number = settings(**needed, **{name: 90_000.0 if "timeout" in name else 15.0})
    assert getattr(by_text, name) == getattr(by_number, name)
    assert isinstance(getattr(by_text, name), float)
    assert getattr(pickle.loads(pickle.dumps(by_text)), name) == getattr(by_number, name)


@pytest.mark.parametrize(
    ("settings", "name"),
    [case for case in CASES if not issubclass(case[0], OF_SERVERS)],
)
def test_a_setting_in_seconds_is_declared_to_take_text(settings: type, name: str) -> None:
    declared = {field.name: field.type for field in fields(settings)}
    assert declared[name] == "Seconds", "type checkers would refuse text"


def test_type_checkers_take_text_and_numbers_and_read_numbers() -> None:
    """Mypy and pyright check this very function: an ignored error that is none is an error."""
    delay = ExponentialDelay(initial_delay_s="2 s", max_delay_s=60)
    assert_type(delay.initial_delay_s, float)
    rate = FailureRate(interval_s="10 min")
    assert_type(rate.interval_s, float)
    settings = RuntimeSettings(start_timeout_s="5 min")
    assert_type(settings.start_timeout_s, float)
    assert (delay.initial_delay_s, rate.interval_s, settings.start_timeout_s) == (2.0, 600.0, 300.0)
    with pytest.raises(ConfigError, match="delay_s"):
        FixedDelay(delay_s=[])  # type: ignore[arg-type]


@pytest.mark.parametrize(("settings", "name"), CASES)
def test_text_that_is_no_duration_is_refused_by_name(settings: type, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='5 lightyears' is not a duration"):
        settings(**{**NEEDED[settings], name: "5 lightyears"})


def test_numbers_are_taken_where_text_is_the_default() -> None:
    assert Checkpointing(interval=1.5).settings().interval_s == 1.5


def test_a_setting_given_as_text_counts_as_given_by_the_program() -> None:
    assert "start_timeout_s" in RuntimeSettings(start_timeout_s="20 s").given
    assert pipeline_settings.RuntimeSettings("20 s").start_timeout_s == 20.0
