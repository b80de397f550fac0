"""The names that users import: listed, documented, one object under each name, cheap to get."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import get_origin

import pytest

import onceflow

ROOT = Path(__file__).parents[2]
FACES = (
    "onceflow",
    "onceflow.connectors",
    "onceflow.sources",
    "onceflow.sinks",
    "onceflow.testing",
)
FOR_CONTRIBUTORS = {"ARCHITECTURE.md", "simulation.md"}
HEAVY = ("pyspark", "confluent_kafka", "psycopg", "pymysql", "sqlalchemy", "rocksdict", "pgpq")


def packages() -> list[str]:
    found = pkgutil.walk_packages(onceflow.__path__, "onceflow.")
    return sorted({*FACES, *(module.name for module in found if module.ispkg)})


def exported(module: ModuleType) -> dict[str, object]:
    return {name: getattr(module, name) for name in getattr(module, "__all__", ())}


def is_class(value: object) -> bool:
    """True if `value` is a class. Python 3.10 also counts an alias such as `Callable[[], int]`."""
    return inspect.isclass(value) and get_origin(value) is None


@pytest.mark.parametrize("name", packages())
def test_exports_are_listed_once_and_in_order(name: str) -> None:
    listed = list[str](getattr(importlib.import_module(name), "__all__", ()))
    assert len(listed) == len(set(listed))
    # Dunders, constants, classes, functions: as the formatter sorts them.
    key = [(not entry.isupper(), not entry[:1].isupper(), entry) for entry in listed]
    assert key == sorted(key)


def statements_of(name: str) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """A module's statements: those that always run, and those for type checkers alone."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    always: list[ast.stmt] = []
    typed: list[ast.stmt] = []
    for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            typed += node.body
        else:
            always.append(node)
    return always, typed


def imported_of_ours(body: list[ast.stmt]) -> dict[str, str]:
    """Each public name that `body` imports from onceflow, and the module that it is imported of."""
    return {
        alias.asname or alias.name: node.module or ""
        for node in body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onceflow")
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_") and alias.name != "lazy_names"
    }


@pytest.mark.parametrize("name", packages())
def test_what_a_package_imports_of_ours_it_exports(name: str) -> None:
    """A name that is importable and unlisted is public by accident."""
    always, typed = statements_of(name)
    imported = {*imported_of_ours(always), *imported_of_ours(typed)}
    assert imported - set(getattr(importlib.import_module(name), "__all__", ())) == set()


@pytest.mark.parametrize("name", [name for name in packages() if statements_of(name)[1]])
def test_a_lazy_name_is_what_type_checkers_take_it_for(name: str) -> None:
    module = importlib.import_module(name)
    always, typed = statements_of(name)
    lazy = imported_of_ours(typed)
    assert {*lazy, *imported_of_ours(always)} == set(module.__all__) - {"__version__"}
    for public, home in lazy.items():
        assert getattr(module, public) is getattr(importlib.import_module(home), public)
    assert set(lazy) <= set(dir(module))
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'Nothing'"):
        _ = module.Nothing


def modules_imported_by(program: str) -> set[str]:
    """Each of our modules that `program` imports."""
    found = set[str]()
    for node in ast.walk(ast.parse(textwrap.dedent(program))):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {module for module in found if module.startswith("onceflow")}


def public_programs() -> list[tuple[str, str]]:
    """The examples and the documents' Python blocks, each with the place where it stands."""
    found = [(path.name, path.read_text("utf-8")) for path in sorted(ROOT.glob("examples/*.py"))]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*.md")]
    for page in sorted(pages):
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text[: block.start()].count("\n") + 1
            found.append((f"{page.relative_to(ROOT)}:{line}", block[1]))
    return found


def test_documents_and_examples_import_the_public_packages_alone() -> None:
    programs = public_programs()
    imported = [
        (place, module) for place, program in programs for module in modules_imported_by(program)
    ]
    assert {module for _, module in imported} >= set(FACES) - {"onceflow.testing"}
    assert [one for one in imported if one[1] not in FACES] == []


def test_no_page_for_users_sends_them_to_an_inner_module() -> None:
    pages = [
        path
        for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        if path.name not in FOR_CONTRIBUTORS and path.parent.name != "decisions"
    ]
    named = [
        (str(path.relative_to(ROOT)), found)
        for path in pages
        for found in re.findall(
            r"\bonceflow\.(?:core|integration|cli)\b[\w.]*", path.read_text("utf-8")
        )
    ]
    assert named == []


def test_a_sink_or_a_source_is_written_with_names_of_one_package() -> None:
    """All that the contracts speak of, and all that our example sinks use of onceflow."""
    root = Path(__file__).parents[2]
    needed = set[str]()
    contracts = (root / "core/spi/sink.py", root / "core/spi/source.py")
    for path in (*contracts, *root.glob("examples/*_sink.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onceflow."):
                needed |= {alias.name for alias in node.names}
            if isinstance(node, ast.ClassDef) and path.parent.name == "spi" and node.name[0] != "_":
                needed.add(node.name)
    assert {"Source", "StagedSink", "TransactionId"} <= needed
    assert needed - set(exported(importlib.import_module("onceflow.connectors"))) == set()


@pytest.mark.parametrize("name", FACES)
def test_every_public_name_is_documented(name: str) -> None:
    silent = [
        public
        for public, value in exported(importlib.import_module(name)).items()
        if (is_class(value) or inspect.isroutine(value)) and not inspect.getdoc(value)
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
        if isinstance(value, type) and is_class(value):
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


@pytest.mark.parametrize("name", [*FACES, "onceflow.core.protocol"])
def test_importing_a_public_package_loads_no_spark_and_no_client(name: str) -> None:
    """A connector's own module is imported in every slot; it pays for what it uses."""
    code = f"import sys, {name}; print([one for one in {HEAVY} if one in sys.modules])"
    assert run_python(code) == "[]"


def test_a_sink_of_ours_loads_no_other_one() -> None:
    """In a slot the sink is unpickled, by which its own module is imported, and no other sink's."""
    code = """
import sys
from onceflow.sinks import FileSink
print([one for one in sys.modules if one.split(".")[:2] == ["onceflow", "sinks"]
       and one.split(".")[2:] in (["postgres"], ["mysql"], ["sqlite"], ["kafka"], ["sql"])])
"""
    assert run_python(code) == "[]"


def test_a_slot_loads_no_sqlalchemy_and_no_spark_for_the_writer_of_a_table() -> None:
    """They take longer to import than all else of a slot, and only what creates tables needs them.

    A slot imports its own code, and by unpickling the sink that one's.
    """
    pickled = run_python("""
import pickle
from onceflow.sinks import MySQLSink, PostgresSink, SQLiteSink
sinks = [
    PostgresSink("postgresql://u:p@h/d", table="t"),
    MySQLSink("mysql://u:p@h/d", table="t"),
    SQLiteSink("/tmp/d.db", table="t"),
]
print(*(pickle.dumps(sink).hex() for sink in sinks))
""").split()
    assert len(pickled) == 3
    loaded = run_python(f"""
import pickle, sys
import onceflow.core.runtime.slot.slot
for pickled in {pickled}:
    sink = pickle.loads(bytes.fromhex(pickled))
    settings = sink.settings
    assert settings.endpoint and settings.rules
    import onceflow.sinks.sql.writer, onceflow.sinks.sql.committer
    print(type(sink).__name__, [one for one in ("sqlalchemy", "pyspark") if one in sys.modules])
""")
    assert loaded.splitlines() == ["PostgresSink []", "MySQLSink []", "SQLiteSink []"]


def test_the_sink_of_mysql_loads_no_pandas() -> None:
    """`pa.scalar` would, where it is installed, and take longer than all else of the sink."""
    code = """
import sys
from onceflow.sinks import MySQLSink
print("onceflow.sinks.mysql.dml" in sys.modules, "pandas" in sys.modules)
"""
    assert run_python(code) == "True False"


def test_importing_onceflow_starts_nothing() -> None:
    """No thread, no Java, no connection."""
    code = """
import threading
import onceflow.connectors, onceflow.sinks, onceflow.sources
from onceflow import *
from onceflow.connectors import *
from onceflow.sinks import *
from onceflow.sources import *
from pyspark import SparkContext

print(threading.active_count(), SparkContext._gateway)
"""
    assert run_python(code) == "1 None"
