"""Connectors are found by name and by the scheme of a URL; what is in the way is said by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, EntryPoint, distribution
from os import PathLike
from pathlib import Path

import pytest
from tests.support.directory_sink import DirectorySink

from onceflow import HeapBackend, RocksDBBackend
from onceflow.connectors import (
    SINKS,
    SOURCES,
    STATE_BACKENDS,
    ConfigError,
    ConnectorCatalog,
    SinkConnector,
)
from onceflow.sinks import FileSink, KafkaSink, MySQLSink, PostgresSink, SQLiteSink
from onceflow.sources import DatagenSource, KafkaSource

OURS = SinkConnector(sink=DirectorySink)
GROUP = "onceflow.sinks"
HERE = f"{__name__}:OURS"


class Package(Distribution):
    """An installed distribution that is none."""

    def __init__(self, name: str, directory: Path) -> None:
        self._metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n"
        self._directory = directory

    def read_text(self, filename: str) -> str | None:
        return self._metadata if filename == "METADATA" else None

    def locate_file(self, path: str | PathLike[str]) -> Path:
        return self._directory / path


def point(name: str, value: str, package: str = "acme") -> EntryPoint:
    found = EntryPoint(name, value, GROUP)
    vars(found)["dist"] = Package(package, Path())
    return found


def catalog_of(*points: EntryPoint) -> ConnectorCatalog[SinkConnector]:
    def installed(group: str) -> Iterable[EntryPoint]:
        assert group == GROUP
        return points

    return ConnectorCatalog("sink connector", GROUP, SINKS.accepts, installed)


def test_a_package_s_connector_is_found_by_name_and_by_scheme() -> None:
    catalog = catalog_of(point("redis", HERE), point("rediss", HERE))
    assert catalog.names() == ("redis", "rediss")
    for url in ("rediss://u:p@host/0", "redis+asyncio://host", "jdbc:redis://host"):
        assert catalog.find_by_url(url) is OURS
    assert catalog.find("redis") is OURS


def test_a_program_s_connector_is_found_as_a_package_s_is() -> None:
    catalog = catalog_of(point("redis", HERE))
    catalog.register("http", OURS)
    catalog.register("http", OURS)
    assert catalog.find_by_url("http://host/rows") is OURS
    assert catalog.names() == ("http", "redis")


def test_a_package_that_is_installed_while_the_program_runs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(tmp_path, (0, 0))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert "acme" not in SINKS.names()
    folder = tmp_path / "acme-1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.2\n")
    (folder / "entry_points.txt").write_text(f"[{GROUP}]\nacme = {HERE}\n")
    assert SINKS.find("acme") is OURS


def test_a_name_that_is_taken_is_not_given_away() -> None:
    catalog = catalog_of(point("redis", HERE))
    catalog.register("http", OURS)
    for taken in ("redis", "http"):
        with pytest.raises(ConfigError, match=f"there is a sink connector '{taken}' already"):
            catalog.register(taken, SinkConnector(sink=DirectorySink))
    with pytest.raises(ConfigError, match="'file' is of type ABCMeta"):
        catalog.register("file", DirectorySink)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    assert catalog.find("http") is OURS


def test_an_unknown_name_is_answered_with_the_nearest_one() -> None:
    catalog = catalog_of(point("postgres", HERE), point("mysql", HERE))
    with pytest.raises(ConfigError) as error:
        catalog.find("postgre")
    assert str(error.value) == (
        "sink connector 'postgre' is not installed: did you mean 'postgres'? installed are mysql,"
        " postgres; a package adds its own by entry points of group onceflow.sinks"
    )
    with pytest.raises(ConfigError, match=r"'oracle' .*installed are mysql, postgres"):
        catalog.find_by_url("oracle://u:hunter2@host/db")
    with pytest.raises(ConfigError, match="must begin with one of mysql://, postgres://") as error:
        catalog.find_by_url("hunter2@host")
    assert "hunter2" not in str(error.value)


def test_two_packages_with_one_name_are_both_named() -> None:
    other = point("redis", "tests.unit.test_catalog:OTHER", "bolt")
    catalog = catalog_of(point("redis", HERE), other, point("http", HERE))
    with pytest.raises(ConfigError) as error:
        catalog.find("redis")
    for named in ("distribution acme 1.2", "distribution bolt 1.2", HERE, "uninstall all but one"):
        assert named in str(error.value)
    assert catalog.find("http") is OURS


def test_the_same_package_found_twice_is_one() -> None:
    catalog = catalog_of(point("redis", HERE), point("redis", HERE))
    assert catalog.find("redis") is OURS


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("acme_is_not_there:X", "ModuleNotFoundError: No module named 'acme_is_not_there'"),
        (f"{__name__}:NOTHING", "AttributeError"),
    ],
)
def test_what_cannot_be_loaded_names_its_distribution(value: str, said: str) -> None:
    catalog = catalog_of(point("redis", value), point("http", HERE))
    with pytest.raises(ConfigError, match=f"{value} of distribution acme 1.2.* cannot be loaded"):
        catalog.find("redis")
    with pytest.raises(ConfigError, match=said):
        catalog.find("redis")
    assert catalog.find("http") is OURS


def test_what_is_no_connector_is_refused_by_its_type() -> None:
    with pytest.raises(ConfigError, match=r"distribution acme 1.2\) is of type str, which does"):
        catalog_of(point("redis", f"{__name__}:GROUP")).find("redis")


def test_ours_are_entry_points_like_any_other() -> None:
    installed = distribution("onceflow").entry_points
    for catalog in (SINKS, SOURCES, STATE_BACKENDS):
        named = installed.select(group=catalog.group).names
        assert named
        assert all(catalog.find(name) for name in named)


def test_ours_are_found() -> None:
    assert SINKS.find("files").sink is FileSink
    assert SINKS.find("kafka").sink is KafkaSink
    assert SINKS.find_by_url("sqlite:////data/rows.db").sink is SQLiteSink
    for url, sink in (
        ("postgresql://u@h/d", PostgresSink),
        ("postgres://u@h/d", PostgresSink),
        ("jdbc:postgresql://h/d", PostgresSink),
        ("mysql+pymysql://u@h/d", MySQLSink),
        ("jdbc:mariadb://h/d", MySQLSink),
    ):
        connector = SINKS.find_by_url(url)
        assert connector.sink is sink
        assert connector.resource_manager is not None
        assert connector.diagnosis is not None
    assert SOURCES.find("datagen").source is DatagenSource
    assert SOURCES.find("kafka").source is KafkaSource
    assert STATE_BACKENDS.find("heap") is HeapBackend
    assert STATE_BACKENDS.find("rocksdb") is RocksDBBackend
    with pytest.raises(ConfigError, match=r"'redis' is not installed: installed are heap, rocksdb"):
        STATE_BACKENDS.find("redis")


def test_a_connector_is_loaded_only_when_it_is_asked_for() -> None:
    code = """
import sys
from onceflow.connectors import SINKS
before = set(sys.modules)
assert "kafka" in SINKS.names()
print([one for one in set(sys.modules) - before if one.startswith("onceflow")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
