"""The jars of Apache Kafka, fetched once from the Maven repository that this machine uses.

Two clients are tried: Maven if installed, which uses ~/.m2/settings.xml, and then the Ivy in
pyspark, which uses ONCEFLOW_IVY_SETTINGS or ~/.ivy2/ivysettings.xml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib import util
from pathlib import Path

from onceflow.core.local_files import cache_directory, publish
from onceflow.integration.servers.process import ServerError, exclusive

# Not 4.3.0 to 4.4.0: if killed during a commit, they may never end the transaction (KAFKA-20734).
KAFKA_VERSION = "4.2.1"
_SCALA = "2.13"
# Kafka logs with slf4j 1.7 and includes no binding. Without a binding there is no log.
_LOG_BINDING = ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4")
_FETCH_TIMEOUT_S = 600.0

Progress = Callable[[str], None]


def java_command() -> str:
    """Return the path of the Java in JAVA_HOME, or else of the Java on PATH.

    Raises:
        ServerError: No Java was found.
    """
    home = os.environ.get("JAVA_HOME")
    if home and (Path(home) / "bin" / "java").exists():
        return str(Path(home) / "bin" / "java")
    java = shutil.which("java")
    if java is None:
        raise ServerError(
            "no Java found in JAVA_HOME or on PATH; install Java 17 or newer "
            "(Debian: apt-get install default-jre-headless; macOS: brew install openjdk@17)"
        )
    return java


def kafka_jars(
    version: str = KAFKA_VERSION,
    *,
    progress: Progress | None = None,
    timeout_s: float = _FETCH_TIMEOUT_S,
) -> Path:
    """Return a directory with the broker's jars. The first call on this machine fetches them.

    Fetches about 44 MB once. Concurrent processes wait for the first one. A crash leaves no
    half-filled directory.

    Args:
        version: Kafka's version.
        progress: Called with a line of text when jars are fetched.
        timeout_s: The timeout of the whole call.

    Raises:
        ServerError: Neither client could fetch the jars. The message has the error of each.
    """
    dependencies = (("org.apache.kafka", f"kafka_{_SCALA}", version), _LOG_BINDING)
    return jars_of(
        f"kafka-{version}",
        dependencies,
        f"Kafka {version} (44 MB, once)",
        progress=progress,
        timeout_s=timeout_s,
    )


def jars_of(
    name: str,
    dependencies: Sequence[tuple[str, str, str]],
    what: str,
    *,
    progress: Progress | None = None,
    timeout_s: float = _FETCH_TIMEOUT_S,
) -> Path:
    """Return a directory with `dependencies` and their dependencies, fetched once.

    A crash leaves no half-filled directory.

    Args:
        name: The name of the directory in the cache, with the version.
        dependencies: The group, artifact and version of each.
        what: The name of the dependencies in messages.
        progress: Called with a line of text when jars are fetched.
        timeout_s: The timeout of the whole call. Concurrent processes wait for the first one.

    Raises:
        ServerError: Neither client could fetch the jars. The message has the error of each.
    """
    target = cache_directory() / name
    if target.is_dir():
        return target
    tell = progress or _ignore
    with exclusive(target.with_name(f"{name}.lock"), timeout_s):
        if not target.is_dir():
            tell(f"fetching {what} into {target}")
            with publish(target) as fresh:
                _fetch(dependencies, what, fresh, tell, timeout_s)
    return target


def _fetch(
    dependencies: Sequence[tuple[str, str, str]],
    what: str,
    into: Path,
    tell: Progress,
    timeout_s: float,
) -> None:
    """Fetch `dependencies` and their dependencies into directory `into`."""
    failures: list[str] = []
    for name, client in (("mvn", _maven), ("Ivy", _ivy)):
        with tempfile.TemporaryDirectory(prefix="onceflow-fetch-") as work:
            try:
                client(dependencies, into, Path(work), timeout_s)
                _check(dependencies, into)
            except (ServerError, OSError, subprocess.SubprocessError) as error:
                failures.append(f"{name}: {error}")
                tell(f"{name} could not fetch {what}")
                for leftover in into.iterdir():
                    leftover.unlink()
                continue
        return
    raise ServerError(
        f"{what} could not be fetched from a Maven repository. "
        + "; ".join(failures)
        + ". Check the network, or set a mirror in ~/.m2/settings.xml (mvn) or an Ivy settings "
        "file in ONCEFLOW_IVY_SETTINGS"
    )


def _maven(
    dependencies: Sequence[tuple[str, str, str]], into: Path, work: Path, timeout_s: float
) -> None:
    if shutil.which("mvn") is None:
        raise ServerError("not installed")
    listed = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
        f"<version>{version}</version></dependency>"
        for group, artifact, version in dependencies
    )
    (work / "pom.xml").write_text(
        "<project><modelVersion>4.0.0</modelVersion><groupId>onceflow</groupId>"
        "<artifactId>kafka</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{listed}</dependencies></project>"
    )
    _run(
        [
            *("mvn", "--batch-mode", "--quiet", "--no-transfer-progress"),
            "dependency:copy-dependencies",
            "-DincludeScope=runtime",
            f"-DoutputDirectory={into}",
        ],
        work,
        timeout_s,
    )


def _ivy(
    dependencies: Sequence[tuple[str, str, str]], into: Path, work: Path, timeout_s: float
) -> None:
    listed = "".join(
        f'<dependency org="{group}" name="{artifact}" rev="{version}" conf="default->default"/>'
        for group, artifact, version in dependencies
    )
    (work / "ivy.xml").write_text(
        '<ivy-module version="2.0"><info organisation="onceflow" module="kafka"/>'
        f'<configurations><conf name="default"/></configurations>'
        f"<dependencies>{listed}</dependencies></ivy-module>"
    )
    _run(
        [
            *(java_command(), "-jar", str(_ivy_jar()), *_ivy_settings()),
            *("-cache", str(work / "cache"), "-ivy", str(work / "ivy.xml")),
            *("-confs", "default", "-types", "jar", "bundle"),
            *("-retrieve", f"{into}/[artifact]-[revision].[ext]"),
        ],
        work,
        timeout_s,
    )


def _ivy_jar() -> Path:
    spec = util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ServerError("pyspark is not installed")
    jars = sorted((Path(spec.origin).parent / "jars").glob("ivy-*.jar"))
    if not jars:
        raise ServerError(f"no ivy-*.jar beside {spec.origin}")
    return jars[-1]


def _ivy_settings() -> list[str]:
    chosen = os.environ.get("ONCEFLOW_IVY_SETTINGS")
    settings = Path(chosen) if chosen else Path.home() / ".ivy2" / "ivysettings.xml"
    return ["-settings", str(settings)] if chosen or settings.exists() else []


def _run(command: Sequence[str], work: Path, timeout_s: float) -> None:
    result = subprocess.run(
        command,
        cwd=work,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout_s,
    )
    if result.returncode != 0:
        raise ServerError(f"status {result.returncode}: {result.stdout.strip()[-600:]}")


def _check(dependencies: Sequence[tuple[str, str, str]], into: Path) -> None:
    for _, artifact, version in dependencies:
        name = f"{artifact}-{version}.jar"
        if not (into / name).is_file():
            raise ServerError(f"{name} is missing from what was fetched")


def _ignore(_message: str) -> None:
    pass
