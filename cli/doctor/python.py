"""Python and the packages of this process, which is what the driver will run."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

from onceflow.cli.doctor.findings import Area, Finding

_MINIMA = {"pyspark": (4, 0), "pyarrow": (18, 0), "confluent-kafka": (2, 6), "psycopg": (3, 2)}


def check_python() -> Sequence[Finding]:
    """Look at the interpreter and at the packages that a job needs."""
    area = Area("python")
    findings: list[Finding] = []
    versions: dict[str, str] = {}
    for package, minimum in _MINIMA.items():
        needed = f"{package}>={'.'.join(map(str, minimum))}"
        remedy = f"{sys.executable} -m pip install '{needed}'"
        try:
            version = versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            findings.append(area.problem(f"{package} is not installed", needed, remedy))
            continue
        if _numbers(version) < minimum:
            findings.append(area.problem(f"{package} {version}", needed, remedy))
    if not findings:
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        findings.append(area.ok(f"Python {platform.python_version()}, {listed}"))
    return findings


def install_command(python: str, versions: Mapping[str, str]) -> str:
    """Return what gives the interpreter `python` the driver's packages, of these versions.

    A package that was installed from a directory or a repository is installed from there again:
    onceflow is in no index.
    """
    wanted = [_requirement(name, version) for name, version in versions.items() if name != "python"]
    return shlex.join([python, "-m", "pip", "install", *wanted])


def _requirement(package: str, version: str) -> str:
    try:
        recorded = metadata.distribution(package).read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # on PYTHONPATH, as in a distribution of Spark
        recorded = None
    if recorded is None:
        return f"{package}=={version}"
    origin = json.loads(recorded)
    if "vcs_info" not in origin:
        return f"{package} @ {origin['url']}"
    vcs = origin["vcs_info"]
    return f"{package} @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
