"""An archive of the classes of a Spark driver's JVM, which later JVMs map to start sooner.

    export SPARK_SUBMIT_OPTS="$(python -m onceflow.connectors.spark.class_archive)"

Loading, verifying and linking some 20,000 classes is most of the start time of Spark's session, and
much of a first job. A JVM that maps the classes from an archive skips these steps. The first call
creates the archive with a session and some small jobs in a separate process, which takes a minute
of processor time. It prints the option for later JVMs. If no archive can be created, it prints
nothing, and the reason to stderr; Spark then starts as usual.

An archive is for one Java and one set of Spark's jars, which are in its name. The JVM compares
both, and continues without the archive, with a message, if they differ. Only jars of a class path
can be archived: a Spark whose `conf` directory contains files has no archive.

Source: JEP 350, Dynamic CDS Archives.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from onceflow.core.local_files import cache_directory, exclusive, is_private, publish

_FILE = "classes.jsa"
_TIMEOUT_S = 900.0
"""The maximum time in seconds of a recording session. It ends a session that hangs."""
_SAID_LINES = 40
"""The number of last lines of Spark's output in an error.

The JVM's lines precede a Python traceback.
"""
_NOT_FOR_THE_RECORDING = ("SPARK_SUBMIT_OPTS", "PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY_PORT")


class NoArchive(Exception):
    """Raised if no archive of classes is possible. The message has the reason."""


def archive_options() -> str:
    """Return the JVM option that uses the archive, or an empty string without an archive.

    This is fast, because it never creates an archive. For `spark.driver.extraJavaOptions`, or
    SPARK_SUBMIT_OPTS.
    """
    try:
        return _option(_archive_path() / _FILE)
    except NoArchive:
        return ""


def archive_is_missing() -> bool:
    """Return True if an archive is missing and could be created.

    False if the creation has failed before.
    """
    try:
        return not _archive_path().is_dir()
    except NoArchive:
        return False


def archive_classes() -> str:
    """Return `archive_options()`. Create the archive first if there is none.

    Other processes that call this meanwhile wait for the first. A failed creation is not repeated
    on this machine, because it takes as long. A killed one leaves nothing.

    Raises:
        NoArchive: The archive cannot be created.
    """
    archive = _archive_path()
    if not archive.is_dir():
        try:
            with exclusive(archive.with_name(f"{archive.name}.lock"), 2 * _TIMEOUT_S):
                # Check again under the lock: the process that held it before may have created the
                # archive.
                if not archive.is_dir():
                    _make(archive)
        except TimeoutError as error:
            raise NoArchive(str(error)) from error
    if option := _option(archive / _FILE):
        return option
    raise NoArchive(f"the archive could not be made; delete the empty {archive} to try again")


def _option(archive: Path) -> str:
    # A JVM runs the code in the archive, so no other user may have written it.
    is_usable = archive.is_file() and is_private(archive.parent)
    return shlex.quote(f"-XX:SharedArchiveFile={archive}") if is_usable else ""


def _archive_path() -> Path:
    """Return the path of the archive's directory for this Java and these jars. It may not exist.

    Raises:
        NoArchive: There is no Java, or no Spark.
    """
    # Spark's own script searches in the same way.
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(f"{home}/bin/java" if home else "java")
    if java is None:
        raise NoArchive("no java: set JAVA_HOME")
    program, jars = Path(java).resolve(), spark_home() / "jars"
    try:
        # The key has paths and modification times, so an upgrade of Java or Spark gets a new
        # archive.
        stamps = [f"{path} {path.stat().st_mtime_ns}" for path in (program, jars)]
    except OSError as error:
        raise NoArchive(f"{jars} cannot be read: {error}") from error
    key = hashlib.sha256("\n".join(stamps).encode()).hexdigest()[:12]
    return cache_directory() / f"spark-classes-{key}"


def spark_home() -> Path:
    """Return the directory of the Spark that a session of this process starts."""
    from pyspark import find_spark_home

    # There is no public function. This private one also starts the JVM.
    return Path(cast("Any", find_spark_home)._find_spark_home()).resolve()


def _make(archive: Path) -> None:
    """Create the directory `archive` with a complete archive, or empty if that fails.

    A JVM that maps an incomplete archive crashes, so the archive gets its name only after a check.
    Only this user may write to the directory: its content decides what later JVMs run.
    """
    with publish(archive) as fresh:
        written = fresh / "written.jsa"
        try:
            _record_and_check(written)
        except NoArchive as error:
            written.unlink(missing_ok=True)
            failed: NoArchive | None = error
        else:
            written.rename(fresh / _FILE)
            failed = None
    if failed is not None:
        raise failed


def _record_and_check(written: Path) -> None:
    # The recording starts its own JVM with its own options.
    env = {name: v for name, v in os.environ.items() if name not in _NOT_FOR_THE_RECORDING}
    env["PYSPARK_PYTHON"] = sys.executable
    program = [sys.executable, "-m", "onceflow.connectors.spark.class_archive_session"]
    try:
        done = subprocess.run(
            [*program, str(written)],
            check=False,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise NoArchive(f"Spark did not end within {_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0 or not written.is_file():
        last_lines = "\n".join(done.stdout.splitlines()[-_SAID_LINES:])
        raise NoArchive(f"Spark ended with status {done.returncode}:\n{last_lines}")


def main() -> int:
    """Print the options, creating the archive if needed.

    Without an archive print the reason to stderr.
    """
    try:
        sys.stdout.write(f"{archive_classes()}\n")
    except NoArchive as error:
        sys.stderr.write(f"no archive of Spark's classes: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
