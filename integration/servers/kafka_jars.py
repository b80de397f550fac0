"""Apache Kafka's own jars, fetched once from the Maven repository that this machine is set up for.

Two ordinary clients are tried: Maven, if installed (it honours ~/.m2/settings.xml), then the Ivy
that pyspark ships (it honours ONCEFLOW_IVY_SETTINGS or ~/.ivy2/ivysettings.xml).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib import util
from pathlib import Path

from onceflow.core.local_files.cache import cache_directory, publish
from onceflow.integration.servers.process import ServerError, exclusive

# Not 4.3.0 to 4.4.0: killed in a commit, they may never end the transaction (KAFKA-20734).
KAFKA_VERSION = "4.2.1"
_SCALA = "2.13"
# Kafka logs through slf4j 1.7 and brings no binding along; without one there is no log at all.
_LOG_BINDING = ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4")
_FETCH_TIMEOUT_S = 600.0

Progress = Callable[[str], None]


def java_command() -> str:
    """Return the path of the Java to use: that of JAVA_HOME, else the one on PATH.

    Raises:
        ServerError: There is none.
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
    """Return a directory with the broker's jars, fetched on the first call on this machine.

    About 44 MB, once; processes that ask at the same time wait for the first. A crash leaves no
    half-filled directory.

    Args:
        version: Kafka's version.
        progress: Told in one line what goes on, only when something is fetched.
        timeout_s: For the whole call.

    Raises:
        ServerError: Neither client could fetch them; says what each answered.
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
    """Return a directory with `dependencies` and whatever they depend on, fetched once.

    A crash leaves no half-filled directory.

    Args:
        name: Of the directory within the cache; with the version.
        dependencies: Group, artifact and version of each.
        what: What a message calls them.
        progress: Told in one line what goes on, only when something is fetched.
        timeout_s: For the whole call; processes that ask at the same time wait for the first.

    Raises:
        ServerError: Neither client could fetch them; says what each answered.
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
    """Fetch `dependencies`, and whatever they depend on, into `into`."""
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
