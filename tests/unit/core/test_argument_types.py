"""Tests that arguments of a wrong type are refused by name in settings and connectors."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow as pa
import pytest

import onceflow
from onceflow import sinks, sources
from onceflow.core.argument_types import check_arguments, check_fields
from onceflow.core.errors import ConfigError

SCHEMA = pa.schema([pa.field("id", pa.int64())])
NEEDED: dict[str, dict[str, Any]] = {
    "AggregatingStateDescriptor": {"name": "a", "function": onceflow.sum_("a"), "type": int},
    "DatagenSource": {"rows": 10, "splits_count": 1},
    "DeltaSink": {"url": "/tmp/table"},
    "EventTimeSessionWindows": {"gap": "1 s"},
    "FileSink": {"url": "/tmp/files"},
    "FileSystemStorage": {"root": "/tmp/storage"},
    "HdfsStorage": {"url": "webhdfs://node:9870/path"},
    "IcebergSink": {"table": "a.b", "catalog": {"type": "in-memory"}},
    "KafkaSink": {"bootstrap_servers": "host:9092", "topic": "t"},
    "KafkaSource": {"bootstrap_servers": "host:9092", "topic": "t", "schema": SCHEMA},
    "ListStateDescriptor": {"name": "a", "type": int},
    "MapStateDescriptor": {"name": "a", "key_type": str, "type": int},
    "MySQLSink": {"url": "mysql://user@host/db", "table": "t"},
    "MySQLTable": {"url": "mysql://user@host/db", "table": "t"},
    "ObjectStorage": {"url": "s3://bucket/prefix"},
    "OutputTag": {"name": "late", "schema": SCHEMA},
    "Pipeline": {"cluster": onceflow.LocalProcesses(), "name": "job"},
    "PostgresChanges": {"url": "postgresql://host/db", "table": "t"},
    "PostgresSink": {"url": "postgresql://host/db", "table": "t"},
    "PostgresTable": {"url": "postgresql://host/db", "table": "t"},
    "ReducingStateDescriptor": {"name": "a", "function": max, "type": int},
    "SQLiteSink": {"url": "/tmp/file.db", "table": "t"},
    "SlidingEventTimeWindows": {"size": "2 s", "slide": "1 s"},
    "StateTtlConfig": {"ttl": "1 h"},
    "TlsFiles": {"certificate": "/tmp/a", "key": "/tmp/b", "authority": "/tmp/c"},
    "TumblingEventTimeWindows": {"size": "1 s"},
    "TumblingProcessingTimeWindows": {"size": "1 s"},
    "ValueStateDescriptor": {"name": "a", "type": int},
    "WatermarkStrategy": {"column": "at"},
}
WRONG: dict[str, Sequence[object]] = {
    "bool": ("false", 1, None),
    "int": ("3", 2.5, True),
    "str": (5, True, ["a"], b"a"),
    "float": ("many", True, [1.0]),
    "Seconds": (True, [1.0]),
}


def settings_of_users() -> Iterator[type[Any]]:
    """The public classes whose fields or parameters a program sets."""
    for module in (onceflow, sinks, sources):
        for name in module.__all__:
            member = getattr(module, name)
            if isinstance(member, type) and hasattr(vars(member).get("__init__"), "__wrapped__"):
                yield member


@pytest.mark.parametrize("kind", list(settings_of_users()))
def test_an_argument_of_another_type_is_refused_by_its_name(kind: type[Any]) -> None:
    needed = NEEDED.get(kind.__name__, {})
    taken: list[str] = []
    for name, parameter in inspect.signature(kind).parameters.items():
        for wrong in WRONG.get(str(parameter.annotation), ()):
            try:
                kind(**needed | {name: wrong})
            except ConfigError as refused:
                assert name in str(refused)  # noqa: PT017 - the same for many arguments
            else:
                taken.append(f"{name}={wrong!r}")
    assert taken == []


def test_each_class_with_options_of_users_checks_them() -> None:
    """The matrix above has them all, so a new one cannot be forgotten."""
    checked = {kind.__name__ for kind in settings_of_users()}
    assert checked >= set(NEEDED)
    with_options = {
        name
        for module in (sinks, sources)
        for name in module.__all__
        if name.endswith(("Changes", "Sink", "Source", "Table"))
        and name not in ("Sink", "Source", "StagedSink")
    }
    assert checked >= with_options


def test_a_path_and_a_timedelta_are_taken_where_a_text_and_seconds_belong() -> None:
    assert sinks.FileSink(cast("Any", Path("/tmp/files"))).url == "/tmp/files"
    assert sinks.SQLiteSink(cast("Any", Path("/tmp/file.db")), table="t").url == "/tmp/file.db"
    checkpointing = onceflow.Checkpointing(
        storage=cast("Any", Path("/tmp/c")), interval=cast("Any", timedelta(seconds=2))
    )
    assert (checkpointing.storage, checkpointing.interval) == ("/tmp/c", 2.0)


def test_a_class_in_place_of_an_object_is_refused_with_the_way_out() -> None:
    pipeline = onceflow.Pipeline(
        onceflow.LocalProcesses(),
        name="job",
        checkpointing=onceflow.Checkpointing(storage="memory://"),
    )
    with pytest.raises(ConfigError, match=r"give an object of it, KafkaSource\(…\)"):
        pipeline.read(cast("Any", sources.KafkaSource), uid="in")


def test_a_secret_of_the_wrong_type_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        sinks.PostgresSink("postgresql://h/d", table="t", password=cast("Any", b"hunter2"))
    assert "hunter2" not in str(refused.value)


@dataclasses.dataclass
class _Base:
    names: Sequence[str] = ()


@check_fields
@dataclasses.dataclass
class _Settings(_Base):
    how: Literal["a", "b"] = "a"
    pairs: tuple[int, str] | None = None
    call: Callable[[int], int] | None = None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"names": "abc"},
            r"_Settings\(names=…\) takes a list \(a text each\), and was given 'abc'",
        ),
        ({"names": ["a", 1]}, r"takes a list \(a text each\), and was given a value of type list"),
        ({"how": 1}, "takes one of 'a', 'b', and was given 1, of type int"),
        ({"call": "f"}, "takes a function or None, and was given 'f'"),
        ({"pairs": 1}, "and was given 1, of type int"),
    ],
)
def test_the_error_says_what_the_argument_takes(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _Settings(**arguments)


def test_what_has_the_declared_type_goes_through_unchanged() -> None:
    settings = _Settings(["a"], "b", (1, "x"), abs)
    assert (settings.names, settings.how, settings.pairs) == (["a"], "b", (1, "x"))
    assert settings.call is abs


def test_a_missing_or_unknown_argument_is_pythons_own_error() -> None:
    @check_arguments
    def call(a: int, *more: int, **others: str) -> tuple[Any, ...]:
        return a, more, others

    assert call(1, 2, b="c") == (1, (2,), {"b": "c"})
    with pytest.raises(TypeError, match="missing 1 required"):
        cast("Any", call)()
    with pytest.raises(ConfigError, match=r"call\(more=…\)"):
        call(1, cast("Any", "2"))
    with pytest.raises(ConfigError, match=r"call\(b=…\)"):
        call(1, b=cast("Any", 2))


def test_a_start_from_something_else_than_a_path_is_refused_by_its_name() -> None:
    checkpointing = onceflow.Checkpointing(storage="/nowhere")
    pipeline = onceflow.Pipeline(onceflow.LocalProcesses(), name="job", checkpointing=checkpointing)
    with pytest.raises(ConfigError, match=r"start\(from_savepoint=…\) takes a text or None"):
        pipeline.start(from_savepoint=cast("Any", 7))
