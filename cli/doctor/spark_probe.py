"""The probe that collects facts about a Spark session, its executors and their storage.

It runs as a program, in a process that can be killed: `python -m onceflow.cli.doctor.spark_probe
<settings, JSON> <file for the answer>`. Functions of the main module are pickled by value. So even
an executor without onceflow can run the probe and report it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast


def main(settings: dict[str, Any], answer: Path) -> None:
    """Collect the facts and write them into `answer`."""
    from pyspark.sql import SparkSession

    from onceflow.core.runtime.cluster.spark import SparkCluster, free_slots, use_own_interpreter
    from onceflow.core.runtime.slot.context import versions
    from onceflow.core.runtime.transport.addresses import leads_to_loopback, to_location

    builder = SparkSession.builder.appName("onceflow doctor").config("spark.ui.enabled", "false")
    if settings["master"]:
        builder = builder.master(settings["master"])
    for name, value in settings["conf"].items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    context = session.sparkContext
    context.setLogLevel("OFF")
    facts: dict[str, Any] = {
        "spark": session.version,
        "master": str(context.master),
        "driver": {**versions(), "pyspark": _version_of("pyspark")},
        "slots": free_slots(context),
        "conf": {
            name: str(context.getConf().get(name, "false")).lower()
            for name in ("spark.dynamicAllocation.enabled", "spark.speculation")
        },
        # If True, every slot is on the driver's machine and can use loopback.
        "one_machine": leads_to_loopback(SparkCluster(session).driver_host),
        "error": "",
        "executors": [],
    }
    try:
        use_own_interpreter(context)
        count = max(1, min(free_slots(context) or 1, settings["tasks"]))
        numbers = context.parallelize(range(count), count)
        driver = to_location("grpc", SparkCluster(session).driver_host, 1)
        look = _looker(settings["probe"], settings["token"], driver)
        facts["executors"] = numbers.mapPartitions(look).collect()
    except Exception as error:
        facts["error"] = str(error)
    answer.write_text(json.dumps(facts), encoding="utf-8")
    session.stop()


def _looker(
    probe: str, token: str, driver: str
) -> Callable[[Iterable[int]], Iterator[dict[str, Any]]]:
    def look(numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
        import importlib
        import pathlib
        import platform
        import socket
        import sys as executor_sys
        import time
        import uuid

        del numbers
        installed: dict[str, str] = {"python": ".".join(platform.python_version_tuple()[:2])}
        for name in ("onceflow", "pyarrow", "numpy", "msgspec", "cloudpickle", "pyspark"):
            try:
                installed[name] = str(importlib.import_module(name).__version__)
            except Exception as error:
                installed[name] = f"missing ({type(error).__name__}: {error})"
        seen = written = ""
        if probe:
            path = pathlib.Path(probe)
            try:
                seen = path.read_text(encoding="ascii")
                mine = path.with_name(f"executor-{uuid.uuid4().hex}")
                mine.write_text(token, encoding="ascii")
                written = token
            except OSError as error:
                seen = seen or f"{error.strerror}"
                written = f"{error.strerror}"
        try:
            addresses = importlib.import_module("onceflow.core.runtime.transport.addresses")
            host = addresses.find_slot_host(driver, None)
            reached: dict[str, Any] | None = {
                "at": host,
                "loopback": addresses.leads_to_loopback(host),
                "network_id": addresses.read_network_id(),
            }
        except ImportError:
            reached = None  # the versions above show that onceflow is missing
        except Exception as error:
            reached = {"trouble": str(error)}
        yield {
            "host": socket.gethostname(),
            "reached": reached,
            "executable": executor_sys.executable,
            "versions": installed,
            "time": time.time(),
            "storage_read": seen,
            "storage_written": written,
        }

    return look


def _version_of(name: str) -> str:
    import importlib

    return str(cast("Any", importlib.import_module(name)).__version__)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
