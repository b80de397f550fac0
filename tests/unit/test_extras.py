"""Without its extras onceflow can be imported and used, and says which one is missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from onceflow.core.imports import EXTRA_OF_PACKAGE
from onceflow.core.settings.configuration_file import parse_toml

ROOT = Path(__file__).parents[2]
PROBE = """
import json, sys

blocked = set(json.loads(sys.argv[1]))

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
answers = {}
for statement in json.loads(sys.argv[2]):
    try:
        exec(statement, {})
        answers[statement] = ""
    except Exception as error:
        answers[statement] = f"{type(error).__name__}: {error}"
print(json.dumps(answers))
"""
WORKS = (
    "import onceflow",
    "from onceflow import *",
    "from onceflow.sinks import FileSink, SQLiteSink; SQLiteSink('/tmp/x.db', table='t')",
    "from onceflow.sources import DatagenSource; DatagenSource()",
    "from onceflow.connectors import *",
    "from onceflow.connectors.catalog import SINKS; SINKS.find('files'); SINKS.find('sqlite')",
    "from onceflow.connectors.spark.formats import *",
    "from onceflow.connectors.spark.formats import SQLiteFormat; SQLiteFormat.write_words()",
    "from onceflow.core.settings.configuration import Configuration; Configuration.load().check()",
    "from onceflow.cli.run.target import load_target",
)
_REGISTRY = (
    "from onceflow.clients.kafka.registry import SchemaRegistry, registry_settings\n"
    "SchemaRegistry(registry_settings('http://h:1'))"
)
FAILS = {
    "from onceflow.sources import KafkaSource": "kafka",
    "from onceflow.sinks import KafkaSink": "kafka",
    "from onceflow.sinks import PostgresSink": "postgres",
    "from onceflow.sinks import MySQLSink": "mysql",
    "from onceflow import RocksDBBackend; RocksDBBackend()": "rocksdb",
    "from onceflow.connectors.catalog import SOURCES; SOURCES.find('kafka')": "kafka",
    "from onceflow.connectors.catalog import SINKS\nSINKS.find('postgres')": "postgres",
    "from onceflow.connectors.spark.formats import KafkaFormat as F; F({}).schema()": "kafka",
    "from onceflow.connectors.spark.formats import PostgresFormat\nPostgresFormat.write_words()": (
        "postgres"
    ),
    "from onceflow.connectors.spark.formats import MySQLFormat as F;"
    " F({'url': 'mysql://u@h/d', 'dbtable': 't'}).schema()": "mysql",
    "from onceflow.sinks.delta.location import TableLocation as Place\n"
    "Place('/tmp/t', {}).require_library()": "delta",
    "from onceflow.core.runtime.metrics.exposition import expose; expose((), '')": "metrics",
    **{
        "from onceflow.core.storage.filesystems.bucket_settings import BucketSettings as Place\n"
        f"Place('{url}').client()": extra
        for url, extra in {"s3://b/x": "s3", "gs://b/x": "gcs", "az://b/x": "azure"}.items()
    },
    "from onceflow import HdfsStorage\n"
    "HdfsStorage('webhdfs://h:9870/p').open('job').log.read()": "hdfs",
    "from onceflow.core.runtime.metrics.open_telemetry import TelemetrySender as Sender\n"
    "from onceflow.core.settings.pipeline_settings import OpenTelemetry as Settings\n"
    "Sender('job', Settings('http://h:1'), 1, list)": "otel",
    "from onceflow.core.runtime.dataflow.batch_iterators import PandasFunction\n"
    "PandasFunction('double', list, None)": "pandas",
    "from onceflow.connectors.spark.streaming.foreach_batch import foreach_batch\n"
    "from onceflow.sinks import SQLiteSink\n"
    "foreach_batch(SQLiteSink('/tmp/x.db', table='t'), checkpoint_location='/tmp/c')": "pandas",
    _REGISTRY: "schema-registry",
    "from onceflow.clients.kafka.registry import KeptSchema, SchemaKind\n"
    "from onceflow.formats.protobuf.schema import compile_schema\n"
    "compile_schema(KeptSchema(1, SchemaKind.PROTOBUF, 'message M {}'))": "protobuf",
    "from onceflow.core.imports import naming_extras\n"
    "with naming_extras(): import onceflow.cli.main": "cli",
}


def ask(statements: Iterable[str], *, without: Iterable[str]) -> dict[str, str]:
    """Return what each statement raises where the packages `without` are not installed."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(list(without)), json.dumps(list(statements))],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT / "src",
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return said


@cache
def answers() -> dict[str, str]:
    return ask([*WORKS, *FAILS], without={*EXTRA_OF_PACKAGE, "google", "obstore"})


@pytest.mark.parametrize("statement", WORKS)
def test_what_needs_no_extra_works_without_any(statement: str) -> None:
    assert answers()[statement] == ""


@pytest.mark.parametrize("statement", FAILS)
def test_what_is_missing_is_told_with_its_extra(statement: str) -> None:
    said = answers()[statement]
    assert said.startswith("MissingExtra: ")
    assert f"install onceflow[{FAILS[statement]}]" in said


def test_what_the_registrys_client_needs_is_told_with_the_extra_too() -> None:
    said = ask([_REGISTRY], without=["cachetools"])[_REGISTRY]
    assert "the package cachetools is not installed here: install onceflow[schema-registry]" in said


def test_the_program_says_what_it_lacks() -> None:
    program = PROBE.partition("answers =")[0] + "from onceflow.cli.entry import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(["typer"])],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT / "src",
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"onceflow: .*install onceflow\[cli\].*\n", done.stderr)


def project() -> dict[str, Any]:
    described: Any = parse_toml((ROOT / "pyproject.toml").read_text())["project"]
    return dict(described)


def names_of(requirements: list[str]) -> set[str]:
    names = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return {name[0].replace("-", "_").lower() for name in names if name}


def test_extras_install_what_the_errors_say() -> None:
    extras = project()["optional-dependencies"]
    installs = {name: names_of(extras[name]) for name in set(EXTRA_OF_PACKAGE.values())}
    assert [
        package
        for package, extra in EXTRA_OF_PACKAGE.items()
        if not any(name.startswith(package) for name in installs[extra])
    ] == []
    assert names_of(project()["dependencies"]).isdisjoint(EXTRA_OF_PACKAGE)


def test_all_has_every_extra_of_jobs() -> None:
    extras = project()["optional-dependencies"]
    (everything,) = extras["all"]
    listed = set(everything.partition("[")[2].rstrip("]").split(","))
    assert listed == extras.keys() - {"all", "demo", "testing"}
