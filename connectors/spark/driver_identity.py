"""The name of the Spark application that writes, for errors of drivers that lose a sink id."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkContext

_APPLICATION = "ONCEFLOW_SPARK_APPLICATION"
_SET_BY_KUBERNETES = "SPARK_APPLICATION_ID"
_PROC = Path("/proc")


def name_application(context: SparkContext) -> None:
    """Pass the application's id to Python workers, which Spark does not do.

    Runs on the driver, before formats are registered.
    """
    context.environment.setdefault(_APPLICATION, context.applicationId)


def describe_driver() -> str:
    """Return application, process and host of this driver.

    All of its Python processes return the same.

    Runs on the driver's machine: in the user's program, or in a Python worker of Spark. If the
    system has no /proc to list processes, each worker names its own parent.
    """
    application = os.environ.get(_APPLICATION) or os.environ.get(_SET_BY_KUBERNETES)
    process = f"process {_driver_process()} on {socket.gethostname()}"
    return f"Spark application {application} ({process})" if application else process


def _driver_process() -> int:
    """Return the JVM to which this process belongs, or else its parent."""
    process = os.getpid()
    try:
        while process > 1:
            fields = (_PROC / str(process) / "stat").read_text().rpartition(")")
            if fields[0].endswith("(java"):
                return process
            process = int(fields[2].split()[1])
    except OSError:
        pass
    return os.getppid()
