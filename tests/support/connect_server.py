"""A server of Spark Connect on this machine, with executors as processes of their own."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.support.standalone import SHORT_LIVED_JVM, SPARK_HOME, SPARK_JVM, spawn


@contextmanager
def connect_server(directory: Path, *settings: str) -> Generator[tuple[str, int]]:
    """Run it for as long as the context lasts; yield its URL and the process id of its JVM."""
    environment = os.environ | {
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LAUNCHER_OPTS": SHORT_LIVED_JVM,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    given = (
        "spark.connect.grpc.binding.address=127.0.0.1",
        "spark.connect.grpc.binding.port=0",
        "spark.ui.enabled=false",
        f"spark.executor.extraJavaOptions={SPARK_JVM}",
        *settings,
    )
    command: list[str | Path] = [
        SPARK_HOME / "bin" / "spark-submit",
        *("--master", "local-cluster[2,1,1024]", "--driver-java-options", SPARK_JVM),
        *(word for setting in given for word in ("--conf", setting)),
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"),
    ]
    log = directory / "connect-server.log"
    process = spawn(command, log, environment)
    try:
        deadline = time.monotonic() + 120
        while not (line := re.search(r"Connect server started at: .*?:(\d+)\s", log.read_text())):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.05)
        yield f"sc://127.0.0.1:{line[1]}", process.pid
    finally:
        process.kill()
        process.wait(60)
