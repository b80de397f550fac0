"""Which Java Spark will run, and whether it is one that Spark runs on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from onceflow.cli.doctor.findings import Area, Finding

VERSION_MIN = 17
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')
_INSTALL = "Debian, Ubuntu: apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17"
_PLACES = ("/usr/lib/jvm/*/bin/java", "/opt/homebrew/opt/openjdk*/bin/java")


def check_java(timeout_s: float) -> Sequence[Finding]:
    """Look at JAVA_HOME, which Spark asks first, and at PATH."""
    area, needed = Area("java"), f"Java {VERSION_MIN} or newer"
    home, on_path = os.environ.get("JAVA_HOME", ""), shutil.which("java")
    if home:
        used = f"{home}/bin/java"
        if not os.access(used, os.X_OK):
            remedy = "unset JAVA_HOME" if on_path else _advice()
            return [area.problem(f"JAVA_HOME={home} has no bin/java, and wins", needed, remedy)]
    elif on_path:
        used = on_path
    else:
        return [area.problem("there is no java on PATH, and no JAVA_HOME", needed, _advice())]
    version = java_version(used, timeout_s)
    if version is None:
        return [area.problem(f"{used} does not tell its version", needed, _advice())]
    if version < VERSION_MIN:
        return [area.problem(f"{used} is Java {version}", needed, _advice())]
    found = [area.ok(f"Java {version} ({used}{', by JAVA_HOME' if home else ''})")]
    other = java_version(on_path, timeout_s) if home and on_path else version
    if other is not None and other != version:
        found.append(
            area.warning(
                f"JAVA_HOME is Java {version} and {on_path} is Java {other}",
                "one Java; Spark takes JAVA_HOME, your shell takes PATH",
                f'export PATH="{home}/bin:$PATH"',
            )
        )
    return found


def java_version(java: str, timeout_s: float) -> int | None:
    """Return the major version of `java`, or None when it does not tell."""
    try:
        said = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(said.stderr) or _VERSION.search(said.stdout)
    if match is None:
        return None
    # Java 8 calls itself 1.8.
    return int(match[2] or 0) if match[1] == "1" else int(match[1])


def _advice() -> str:
    installed = sorted(str(java) for place in _PLACES for java in Path("/").glob(place[1:]))
    for java in installed:
        if (java_version(java, 10.0) or 0) >= VERSION_MIN:
            return f"export JAVA_HOME={java.removesuffix('/bin/java')}"
    return _INSTALL
