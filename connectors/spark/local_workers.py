"""Python workers of a local master that start faster.

Spark starts a Python process for each step of planning and committing a format, and a daemon for
the tasks. All of them import Spark's modules from a zip, which is compiled again in each process,
and the tasks import onceflow and pandas again and again. With a local master, all run on this
machine, so the driver may choose how they start:

    their interpreter   that of this process, unless the user has chosen one
    their daemon        `onceflow.connectors.python_daemon`, which imports onceflow once
    their path          without Spark's zip, if Spark is also installed unpacked

Workers on other machines may lack onceflow, so these functions leave other masters unchanged.
"""

from __future__ import annotations

import os
import site
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from onceflow.core.runtime.cluster.spark import is_local, use_own_interpreter

if TYPE_CHECKING:
    from pyspark import SparkContext

DAEMON_SETTING = "spark.python.daemon.module"
DAEMON = "onceflow.connectors.python_daemon"
_WORKER_PATH = Path(__file__).resolve().parents[1] / "worker_path"
_PATH = "PYTHONPATH"


def start_workers_fast(context: SparkContext) -> None:
    """Set interpreter, daemon and path of Python workers that start from now on.

    Runs on the driver. Idempotent. Does nothing under another master than a local one. A daemon
    that the user has chosen stays.
    """
    if not is_local(context):
        return
    use_own_interpreter(context)
    if context.pythonExec != sys.executable or not is_installed():
        return
    configuration = cast("Any", context)._jsc.sc().conf()
    if not configuration.contains(DAEMON_SETTING):
        configuration.set(DAEMON_SETTING, DAEMON)
    environment = cast("dict[str, str]", context.environment)
    environment[_PATH] = add_worker_path(environment.get(_PATH, ""))


def add_worker_path(path: str) -> str:
    """Return the PYTHONPATH `path` with the directory whose `sitecustomize` removes Spark's zip."""
    entries = [entry for entry in path.split(os.pathsep) if entry]
    if str(_WORKER_PATH) not in entries:
        entries.append(str(_WORKER_PATH))
    return os.pathsep.join(entries)


@cache
def is_installed() -> bool:
    """Return True if each process of this interpreter can import onceflow.

    False if only this process can, for example because Spark was given onceflow by `--py-files`.
    """
    try:
        directory = Path(str(distribution("onceflow").locate_file(""))).resolve()
    except PackageNotFoundError:
        return False
    directories = [*site.getsitepackages(), site.getusersitepackages()]
    return directory in [Path(entry).resolve() for entry in directories]
