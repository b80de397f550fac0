"""An environment with onceflow and all that it needs, packed, as users send one along.

What pip would install there is copied from our own environment; pyspark is left to Spark.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).parents[2]
ENVIRONMENT_PYTHON = "./environment/bin/python"
"""Where the directory is that it was made in, and where Spark unpacks what is sent."""
SEND_ENVIRONMENT = ["--archives", "environment.tar.gz#environment"]
"""For spark-submit, in that directory."""


def build_wheel(directory: Path) -> Path:
    """Build onceflow's wheel there."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(build, cwd=_ROOT, check=True, capture_output=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def pack_environment(directory: Path, wheel: Path) -> None:
    """Make `environment` there, and `environment.tar.gz` of it."""
    venv.create(directory / "environment", with_pip=False)
    (site,) = (directory / "environment").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    for name in _list_requirements("onceflow") - {"onceflow"}:
        for file in importlib.metadata.files(name) or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(file.locate()), site / file)
    pack = ["tar", "-C", "environment", "--exclude=pyspark", "-czf", "environment.tar.gz", "."]
    subprocess.run(pack, cwd=directory, check=True)


def _list_requirements(name: str) -> set[str]:
    """Return the names of what is installed with `name`, its own among them, but for pyspark."""
    found: set[str] = set()
    todo = [name]
    while todo:
        one = canonicalize_name(todo.pop())
        if one in found or one == "pyspark":
            continue
        found.add(one)
        wanted = map(Requirement, importlib.metadata.requires(one) or ())
        # Of an extra, what is there: psycopg's is its client library.
        todo += [each.name for each in wanted if _is_installed(each)]
    return found


def _is_installed(requirement: Requirement) -> bool:
    extras = ("", "binary", "rsa", "hdfs", "kafka", "mysql", "postgres", "rocksdb")
    if requirement.marker and not any(requirement.marker.evaluate({"extra": x}) for x in extras):
        return False
    return bool(list(importlib.metadata.distributions(name=requirement.name)))
