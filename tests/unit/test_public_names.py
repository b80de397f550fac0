"""The names that users import: listed, documented, one object under each name, cheap to get."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import onceflow

FACES = (
    "onceflow",
    "onceflow.connectors",
    "onceflow.sources",
    "onceflow.sinks",
    "onceflow.core.state",
)


def packages() -> list[str]:
    found = pkgutil.walk_packages(onceflow.__path__, "onceflow.")
    return ["onceflow", *sorted(module.name for module in found if module.ispkg)]


def exported(module: ModuleType) -> dict[str, object]:
    return {name: getattr(module, name) for name in getattr(module, "__all__", ())}


@pytest.mark.parametrize("name", packages())
def test_exports_are_listed_once_and_in_order(name: str) -> None:
    listed = list[str](getattr(importlib.import_module(name), "__all__", ()))
    assert len(listed) == len(set(listed))
    # Dunders, constants, classes, functions: as the formatter sorts them.
    key = [(not entry.isupper(), not entry[:1].isupper(), entry) for entry in listed]
    assert key == sorted(key)


@pytest.mark.parametrize("name", packages())
def test_what_a_package_imports_of_ours_it_exports(name: str) -> None:
    """A name that is importable and unlisted is public by accident."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    body = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body
    imported = {
        alias.asname or alias.name
        for node in body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onceflow")
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }
    assert imported - set(getattr(module, "__all__", ())) == set()


def test_a_sink_or_a_source_is_written_with_names_of_one_package() -> None:
    """All that the contracts speak of, and all that our example sinks use of onceflow."""
    root = Path(__file__).parents[2]
    needed = set[str]()
    for path in (root / "core/spi.py", *root.glob("examples/*_sink.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onceflow."):
                needed |= {alias.name for alias in node.names}
            if isinstance(node, ast.ClassDef) and path.name == "spi.py":
                needed.add(node.name)
    assert {"Source", "StagedSink", "TransactionId"} <= needed
    assert needed - set(exported(importlib.import_module("onceflow.connectors"))) == set()


@pytest.mark.parametrize("name", FACES)
def test_every_public_name_is_documented(name: str) -> None:
    silent = [
        public
        for public, value in exported(importlib.import_module(name)).items()
        if (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value)
    ]
    assert silent == []


def test_one_name_is_one_object_wherever_it_is_exported() -> None:
    seen: dict[str, object] = {}
    for package in packages():
        for name, value in exported(importlib.import_module(package)).items():
            if name.startswith("__"):
                continue
            assert seen.setdefault(name, value) is value, f"{package}.{name}"


@pytest.mark.parametrize("name", FACES)
def test_public_classes_are_found_where_pickle_looks(name: str) -> None:
    """Settings travel to the executors: their class must be importable under its own name."""
    for public, value in exported(importlib.import_module(name)).items():
        if inspect.isclass(value):
            assert pickle.loads(pickle.dumps(value)) is value, public
            assert value.__module__.startswith("onceflow."), public


def run_python(code: str) -> str:
    source = str(Path(onceflow.__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": source, "PATH": ""},
    )
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["onceflow.core", "onceflow.core.protocol", "onceflow.core.spi"])
def test_writing_a_sink_needs_no_spark_and_no_client(name: str) -> None:
    """The contracts and the protocol import without the heavy half of the dependencies."""
    code = f"""
import importlib, sys
from importlib.util import find_spec, module_from_spec

sys.modules["onceflow"] = module_from_spec(find_spec("onceflow"))  # not run: it exports everything
importlib.import_module({name!r})
heavy = ("pyspark", "confluent_kafka", "psycopg", "rocksdict", "sqlalchemy")
print([name for name in heavy if name in sys.modules])
"""
    assert run_python(code) == "[]"


def test_importing_onceflow_starts_nothing() -> None:
    """No thread, no Java, no connection."""
    code = """
import threading
import onceflow, onceflow.sinks, onceflow.sources
from pyspark import SparkContext

print(threading.active_count(), SparkContext._gateway)
"""
    assert run_python(code) == "1 None"
