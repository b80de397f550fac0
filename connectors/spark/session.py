"""A Spark session for jobs, with which the first row comes in about half of the time.

    spark = onceflow.session("local[2]")
    pipeline = Pipeline(spark, name="ledger", …)

Spark's own builder makes it. Set are three things that each user would otherwise have to find:

    classes      the JVM takes them from an archive (see `class_archive`), once there is one
    compiling    the JVM compiles for a short life: the driver of a job starts slots, then it waits
    workers      Spark's Python daemon imports onceflow once, and forks the slots from there; under
                 a local master it is the Python of this process, and not the first on PATH
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from onceflow.connectors.spark.class_archive import archive_is_missing, archive_options, spark_home
from onceflow.core.errors import ConfigError
from onceflow.core.runtime.cluster.spark import use_own_interpreter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NO_CONF: Mapping[str, str] = MappingProxyType({})
_SHORT_LIFE = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_OPTIONS = "SPARK_SUBMIT_OPTS"
OPTIONS_OF_USERS = (_OPTIONS, "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")
"""The environment variables that may contain options of a JVM."""
_OPTIONS_IN_CONF = "spark.driver.extraJavaOptions"
_DAEMON = "spark.python.daemon.module"


def session(
    master: str | None = None,
    *,
    name: str = "onceflow",
    conf: Mapping[str, str] = _NO_CONF,
    make_archive: bool = True,
) -> SparkSession:
    """Return Spark's session of this process, started for jobs of onceflow if there is none yet.

    Runs on the driver. The JVM is tuned only where this call starts it, and where nobody has set
    options of the JVM: in `conf`, in the environment or in spark-defaults.conf. Then it takes its
    classes from the archive of this machine, and compiles for a short life, which queries over
    large tables pay for: give `conf` a `spark.driver.extraJavaOptions`, which may be empty.

    Args:
        master: As Spark's builder takes it; None: as Spark is configured, or `local[*]`.
        name: Of the application, as Spark shows it.
        conf: Settings of Spark; they hold over what is set here.
        make_archive: Where the archive of classes is missing, have it made for the next start: in
            a process of its own, of low priority, that takes half a minute of a core. Say False
            where what is written below `ONCEFLOW_CACHE` is lost at the end, as in a container.

    Raises:
        ConfigError: `master` is an address of Spark Connect, whose sessions have no JVM here.
    """
    from pyspark.sql import SparkSession

    if master is not None and master.startswith("sc://"):
        raise ConfigError(
            f"onceflow.session starts Spark's driver in this process, but {master} is an address"
            " of Spark Connect: use SparkSession.builder.remote"
        )
    builder = SparkSession.Builder().appName(name)
    if master is not None:
        builder = builder.master(master)
    # The user's settings last, so that they win.
    for setting, value in {_DAEMON: "onceflow.connectors.python_daemon", **conf}.items():
        builder = builder.config(setting, value)
    if not _starts_own_jvm():
        return builder.getOrCreate()
    tuned = not _has_jvm_options(conf)
    options = {_OPTIONS: f"{archive_options()} {_SHORT_LIFE}"} if tuned else {}
    with _set_for_the_jvm(options):
        started = builder.getOrCreate()
    use_own_interpreter(started.sparkContext)
    if tuned and make_archive and archive_is_missing():
        _make_archive_in_background()
    return started


def _starts_own_jvm() -> bool:
    """Return True if a session here would start a JVM. Under spark-submit a JVM is running."""
    from pyspark import SparkContext

    return cast("Any", SparkContext)._gateway is None and "PYSPARK_GATEWAY_PORT" not in os.environ


def _has_jvm_options(conf: Mapping[str, str]) -> bool:
    """Return True if the user has chosen JVM options: two collectors would end the JVM."""
    if _OPTIONS_IN_CONF in conf or any(os.environ.get(name) for name in OPTIONS_OF_USERS):
        return True
    directory = os.environ.get("SPARK_CONF_DIR")
    defaults = Path(directory) if directory else spark_home() / "conf"
    try:
        return _OPTIONS_IN_CONF in (defaults / "spark-defaults.conf").read_text("utf-8")
    except OSError:
        return False


@contextmanager
def _set_for_the_jvm(environment: Mapping[str, str]) -> Generator[None]:
    """Set `environment` for a JVM that is started inside the context.

    No name in it may be set before.

    The options are here rather than in Spark's settings, so that the user's options come after
    them.
    """
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in environment:
            # The JVM reads them at its start. Later processes must not inherit them.
            del os.environ[name]


def _make_archive_in_background() -> None:
    command = [sys.executable, "-m", "onceflow.connectors.spark.class_archive"]
    if nice := shutil.which("nice"):
        command = [nice, "-n", "19", *command]
    # The shell ends at once, and no process has to wait for the command in its background.
    shell = ["sh", "-c", '"$@" >/dev/null 2>&1 </dev/null &', "sh", *command]
    subprocess.run(shell, check=False)
