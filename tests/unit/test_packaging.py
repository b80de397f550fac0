"""The built wheel: what is in it, and that a fresh environment can use all of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path

import pytest

import onceflow

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("cli", "clients", "connectors", "core", "formats", "integration", "sinks", "sources")

# Imports every module of the installed package and looks up every name that one says is public.
WORKER_PATH = "/connectors/worker_path/"
"""A folder that is on the path of Spark's workers, and no package."""
IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
import onceflow

found = {"file": onceflow.__file__, "modules": [], "names": []}
modules = ["onceflow", *(m.name for m in pkgutil.walk_packages(onceflow.__path__, "onceflow."))]
for name in modules:
    module = importlib.import_module(name)
    found["modules"].append(name)
    for public in getattr(module, "__all__", ()):
        getattr(module, public)
        found["names"].append(f"{name}.{public}")
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source archive of the tree, and a wheel built from that archive."""
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)])
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def fresh_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it; what it depends on comes from ours, after its own."""
    environment = tmp_path_factory.mktemp("fresh")
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)])
    (site,) = environment.glob("lib/python*/site-packages")
    # A plain path: our own .pth files, with the tree's folder in one of them, are not read there.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(command: list[str], cwd: Path | None = None) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=150
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def written_modules() -> set[str]:
    """Return the modules that the wheel must have, under the names that users import."""
    modules = {
        f"onceflow/{path.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    page = (ROOT / "core/runtime/driver/page").iterdir()
    monitoring = (ROOT / "core/runtime/metrics/files").iterdir()
    modules |= {f"onceflow/{path.relative_to(ROOT).as_posix()}" for path in (*page, *monitoring)}
    found_by_spark = {path.name for path in (ROOT / "src").glob("pyspark_*.py")}
    return (
        modules
        | found_by_spark
        | {"onceflow/__init__.py", "onceflow/py.typed", "onceflow/testing.py"}
    )


def test_wheel_holds_the_package_whole_and_nothing_else(wheel: Path) -> None:
    code = {name for name in names_in(wheel) if ".dist-info/" not in name}
    assert code == written_modules()


def test_wheel_names_its_license_version_and_command(wheel: Path) -> None:
    information = f"onceflow-{onceflow.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_string(archive.read(f"{information}/METADATA").decode())
        license_text = archive.read(f"{information}/licenses/LICENSE").decode()
        entry_points = ConfigParser()
        entry_points.read_string(archive.read(f"{information}/entry_points.txt").decode())
    assert metadata["Version"] == onceflow.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in license_text
    assert entry_points["console_scripts"]["onceflow"] == "onceflow.cli.entry:main"
    assert {"discard", "files", "kafka", "mariadb", "mysql", "postgres"} <= entry_points[
        "onceflow.sinks"
    ].keys()
    assert {"datagen", "kafka", "nexmark"} <= entry_points["onceflow.sources"].keys()
    assert {"mariadb", "mysql", "postgresql"} <= entry_points["onceflow.lookups"].keys()
    assert {"heap", "rocksdb"} == entry_points["onceflow.state_backends"].keys()


def test_source_archive_holds_the_code_once(dist: Path) -> None:
    """The links are left out: what they lead to is there under its own name."""
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members}
    assert {"core/spi/sink.py", "demo/run.py", "script/test", "LICENSE"} <= names
    assert [name for name in names if name.startswith("src/onceflow/core")] == []
    assert [name for name in names if name.startswith((".git/", ".venv", ".cache"))] == []


def test_every_public_name_imports_in_a_fresh_environment(
    fresh_python: Path, tmp_path: Path
) -> None:
    found = json.loads(run([str(fresh_python), "-c", IMPORT_EVERYTHING], cwd=tmp_path))
    # Not from the tree, which also lies on the path of an editable install.
    assert Path(found["file"]).is_relative_to(fresh_python.parent.parent)
    assert {f"onceflow.{name}" for name in onceflow.__all__} <= set(found["names"])
    assert {"onceflow.sinks.PostgresSink", "onceflow.sources.KafkaSource"} <= set(found["names"])
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in written_modules()
        if name.endswith(".py") and name.startswith("onceflow/") and WORKER_PATH not in name
    }
    assert set(found["modules"]) == modules


@pytest.mark.servers
def test_the_command_runs_in_a_fresh_environment(fresh_python: Path, tmp_path: Path) -> None:
    command = fresh_python.with_name("onceflow")
    assert "demo" in run([str(command), "--help"], cwd=tmp_path)
    demo = subprocess.run([str(command), "demo"], capture_output=True, cwd=tmp_path, check=False)
    assert (demo.returncode, b"run script/demo there" in demo.stderr) == (2, True), demo


@pytest.mark.servers
def test_bare_names_of_the_folders_are_not_installed(fresh_python: Path, tmp_path: Path) -> None:
    """`core` or `sinks` at the top of site-packages would clash with everybody's."""
    looked_up = "; ".join(
        ["from importlib.util import find_spec"]
        + [f"assert find_spec({name!r}) is None, {name!r}" for name in FOLDERS]
    )
    run([str(fresh_python), "-c", looked_up], cwd=tmp_path)


def test_no_document_or_message_installs_onceflow_by_its_name_alone() -> None:
    """It is in no index: a path or a repository has to be named, and an extra that there is."""
    names = run(["git", "ls-files", "*.md", *FOLDERS], cwd=ROOT).split()
    lines = [
        (f"{name}:{number}", line)
        for name in names
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"pip install .*onceflow", line)
    ]
    assert len(lines) > 3
    alone = re.compile(r"(?<![\w/])onceflow(?:\[[\w,]*\])?(?! @ |[\w/.\[])")
    assert [place for place, line in lines if alone.search(line.partition("#")[0])] == []
    extras = set(re.findall(r"onceflow\[(\w+)\]", "\n".join(line for _, line in lines)))
    described = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert [extra for extra in extras if f"\n{extra} = [" not in described] == []
