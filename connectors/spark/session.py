"""A Spark session for jobs, with which the first row comes in about half of the time.

    spark = onceflow.session("local[2]")
    pipeline = Pipeline(spark, name="ledger", …)

`session` calls Spark's own builder, and makes three choices:

    classes      the JVM reads its classes from an archive (see `class_archive`), once one exists
    compiling    the JVM compiles for a short life, because a job's driver starts slots and waits
    workers      Spark's Python daemon imports onceflow once, and forks the slots. With a local
                 master, workers start as `local_workers` describes
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
from onceflow.connectors.spark.local_workers import (
    DAEMON,
    DAEMON_SETTING,
    add_worker_path,
    is_installed,
    start_workers_fast,
)
from onceflow.core.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NO_CONF: Mapping[str, str] = MappingProxyType({})
_SHORT_LIFE = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_OPTIONS = "SPARK_SUBMIT_OPTS"
OPTIONS_OF_USERS = (_OPTIONS, "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")
"""The environment variables that may contain options of a JVM."""
_OPTIONS_IN_CONF = "spark.driver.extraJavaOptions"


def session(
    master: str | None = None,
    *,
    name: str = "onceflow",
    conf: Mapping[str, str] = _NO_CONF,
    make_archive: bool = True,
) -> SparkSession:
    """Return Spark's session of this process, started for jobs of onceflow if there is none yet.

    Runs on the driver. The JVM is tuned if this call starts it, and if `conf`, the environment and
    spark-defaults.conf contain no options of the JVM. Then it reads its classes from the archive of
    this machine, and compiles for a short life. That is slow for queries over large tables: set
    `spark.driver.extraJavaOptions` in `conf` for them. The value may be empty.

    Args:
        master: The master, as in Spark's builder. None: as Spark is configured, or `local[*]`.
        name: The name of the application.
        conf: Settings of Spark. They override those of this function.
        make_archive: If the archive of classes is missing, start a process that makes it for the
            next start. It has low priority and takes half a minute of a core. Pass False if
            `ONCEFLOW_CACHE` is lost at the end of the process, as in a container.

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
    for setting, value in {DAEMON_SETTING: DAEMON, **conf}.items():
        builder = builder.config(setting, value)
    if not _starts_own_jvm():
        return builder.getOrCreate()
    tuned = not _has_jvm_options(conf)
    environment = {_OPTIONS: f"{archive_options()} {_SHORT_LIFE}"} if tuned else {}
    if _is_local(master, conf) and is_installed():
        # Spark runs its search for formats with these, before a context has settings of its own.
        environment["PYTHONPATH"] = add_worker_path(os.environ.get("PYTHONPATH", ""))
        if "spark.pyspark.python" not in conf and not os.environ.get("PYSPARK_PYTHON"):
            environment["PYSPARK_PYTHON"] = sys.executable
    with _set_for_the_jvm(environment):
        started = builder.getOrCreate()
    start_workers_fast(started.sparkContext)
    if tuned and make_archive and archive_is_missing():
        _make_archive_in_background()
    return started


def _starts_own_jvm() -> bool:
    """Return True if a session here would start a JVM. Under spark-submit a JVM is running."""
    from pyspark import SparkContext

    return cast("Any", SparkContext)._gateway is None and "PYSPARK_GATEWAY_PORT" not in os.environ


def _is_local(master: str | None, conf: Mapping[str, str]) -> bool:
    """Return True if the session's master is named, and runs all tasks in this machine's JVM."""
    chosen = conf.get("spark.master") or master or ""
    return chosen == "local" or chosen.startswith("local[")


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
    """Set `environment` for a JVM that is started inside the context, and restore it at the end.

    Later processes of the program must not inherit it. Options of the JVM are here rather than in
    Spark's settings, so that the user's options come after them.
    """
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _make_archive_in_background() -> None:
    command = [sys.executable, "-m", "onceflow.connectors.spark.class_archive"]
    if nice := shutil.which("nice"):
        command = [nice, "-n", "19", *command]
    # The shell ends at once, and no process has to wait for the command in its background.
    shell = ["sh", "-c", '"$@" >/dev/null 2>&1 </dev/null &', "sh", *command]
    subprocess.run(shell, check=False)
