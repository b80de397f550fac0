"""Which Spark application writes: what others are told when it takes a sink id from them."""

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
    """Let Python workers know the id of their application, which Spark does not tell them.

    Runs on the driver, before formats are registered.
    """
    context.environment.setdefault(_APPLICATION, context.applicationId)


def describe_driver() -> str:
    """Return application, process and host of this driver: equal in all of its Python processes.

    Runs on the driver's machine: in the user's program, or in a Python worker of Spark's. Where the
    system does not list processes (it has no /proc), each worker names its own parent.
    """
    application = os.environ.get(_APPLICATION) or os.environ.get(_SET_BY_KUBERNETES)
    process = f"process {_driver_process()} on {socket.gethostname()}"
    return f"Spark application {application} ({process})" if application else process


def _driver_process() -> int:
    """Return the JVM that this process is of, or else its parent."""
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
