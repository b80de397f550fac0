"""Without its extras onceflow can be imported and used, and says which one is missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from onceflow.core.imports.extras import EXTRA_OF_PACKAGE
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
    "from onceflow.core.imports.extras import naming_extras\n"
    "with naming_extras(): import onceflow.cli.main": "cli",
}


@cache
def answers() -> dict[str, str]:
    done = subprocess.run(
        [
            *(sys.executable, "-c", PROBE, json.dumps(sorted({*EXTRA_OF_PACKAGE, "obstore"}))),
            json.dumps([*WORKS, *FAILS]),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT / "src",
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize("statement", WORKS)
def test_what_needs_no_extra_works_without_any(statement: str) -> None:
    assert answers()[statement] == ""


@pytest.mark.parametrize("statement", FAILS)
def test_what_is_missing_is_told_with_its_extra(statement: str) -> None:
    said = answers()[statement]
    assert said.startswith("MissingExtra: ")
    assert f"install onceflow[{FAILS[statement]}]" in said


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
    names = (re.match(r"[\w.-]+", one) for one in requirements)
    return {name[0].replace("-", "_").lower() for name in names if name}


def test_extras_install_what_the_errors_say() -> None:
    extras = project()["optional-dependencies"]
    installs = {name: names_of(extras[name]) for name in set(EXTRA_OF_PACKAGE.values())}
    assert [
        package for package, extra in EXTRA_OF_PACKAGE.items() if package not in installs[extra]
    ] == []
    assert names_of(project()["dependencies"]).isdisjoint(EXTRA_OF_PACKAGE)


def test_all_has_every_extra_of_jobs() -> None:
    extras = project()["optional-dependencies"]
    (everything,) = extras["all"]
    listed = set(everything.partition("[")[2].rstrip("]").split(","))
    assert listed == extras.keys() - {"all", "demo", "testing"}
