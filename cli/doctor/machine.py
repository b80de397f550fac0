"""The checks of Java, Python and packages on this machine, where the driver will run."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from onceflow.core.spi.connector import Area, Finding

JAVA_VERSION_MIN = 17
_JAVA_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')
_INSTALL = "Debian, Ubuntu: apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17"
_PLACES = ("/usr/lib/jvm/*/bin/java", "/opt/homebrew/opt/openjdk*/bin/java")
_MINIMA = {"pyspark": (4, 0), "pyarrow": (20, 0)}
_MINIMA_OF_EXTRAS = {"confluent-kafka": (2, 13), "psycopg": (3, 2)}
"""The minimum versions of optional packages, which are checked only if they are installed."""


def check_java(timeout_s: float) -> Sequence[Finding]:
    """Check JAVA_HOME, which Spark uses first, and PATH."""
    area, needed = Area("java"), f"Java {JAVA_VERSION_MIN} or newer"
    home, on_path = os.environ.get("JAVA_HOME", ""), shutil.which("java")
    # JAVA_HOME comes first, as in Spark: a wrong JAVA_HOME overrides a good java on PATH.
    if home:
        used = f"{home}/bin/java"
        if not os.access(used, os.X_OK):
            remedy = "unset JAVA_HOME" if on_path else _java_advice()
            return [
                area.problem(
                    f"JAVA_HOME={home} has no bin/java, and Spark uses JAVA_HOME before PATH",
                    needed,
                    remedy,
                )
            ]
    elif on_path:
        used = on_path
    else:
        return [
            area.problem("java is not on PATH, and JAVA_HOME is not set", needed, _java_advice())
        ]
    version = java_version(used, timeout_s)
    if version is None:
        return [area.problem(f"{used} does not print its version", needed, _java_advice())]
    if version < JAVA_VERSION_MIN:
        return [area.problem(f"{used} is Java {version}", needed, _java_advice())]
    findings = [area.ok(f"Java {version} ({used}{', by JAVA_HOME' if home else ''})")]
    other = java_version(on_path, timeout_s) if home and on_path else version
    if other is not None and other != version:
        findings.append(
            area.warning(
                f"JAVA_HOME is Java {version} and {on_path} is Java {other}",
                "one Java; Spark uses JAVA_HOME, your shell uses PATH",
                f'export PATH="{home}/bin:$PATH"',
            )
        )
    return findings


def java_version(java: str, timeout_s: float) -> int | None:
    """Return the major version of `java`, or None if it is unknown."""
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # Java prints its version on stderr. Some vendors' wrappers print it on stdout.
    match = _JAVA_VERSION.search(done.stderr) or _JAVA_VERSION.search(done.stdout)
    if match is None:
        return None
    # Java 8 reports the version 1.8.
    return int(match[2] or 0) if match[1] == "1" else int(match[1])


def _java_advice() -> str:
    installed = sorted(str(java) for pattern in _PLACES for java in Path("/").glob(pattern[1:]))
    for java in installed:
        if (java_version(java, 10.0) or 0) >= JAVA_VERSION_MIN:
            return f"export JAVA_HOME={java.removesuffix('/bin/java')}"
    return _INSTALL


def check_python() -> Sequence[Finding]:
    """Check the interpreter and the packages that a job needs."""
    area = Area("python")
    findings: list[Finding] = []
    versions: dict[str, str] = {}
    for package, minimum in (_MINIMA | _MINIMA_OF_EXTRAS).items():
        needed = f"{package}>={'.'.join(map(str, minimum))}"
        remedy = f"{sys.executable} -m pip install '{needed}'"
        try:
            version = versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            if package in _MINIMA_OF_EXTRAS:
                continue
            findings.append(area.problem(f"{package} is not installed", needed, remedy))
            continue
        if _numbers(version) < minimum:
            findings.append(area.problem(f"{package} {version}", needed, remedy))
    if not findings:
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        findings.append(area.ok(f"Python {platform.python_version()}, {listed}"))
    return findings


def install_command(python: str, versions: Mapping[str, str]) -> str:
    """Return the command that installs the driver's packages for the interpreter `python`.

    The command has the driver's versions. A package that was installed from a directory or a
    repository is installed from there again, because onceflow is in no index.
    """
    requirements = [
        _requirement(name, version) for name, version in versions.items() if name != "python"
    ]
    return shlex.join([python, "-m", "pip", "install", *requirements])


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
    # Compare two numbers only: a release candidate has letters in the third.
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
