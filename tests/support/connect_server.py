"""A server of Spark Connect on this machine, with executors as processes of their own."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.support.program import Program
from tests.support.standalone import SHORT_LIVED_JVM, SPARK_HOME, SPARK_JVM


@contextmanager
def connect_server(directory: Path, *settings: str) -> Generator[tuple[str, int]]:
    """Run it for as long as the context lasts; yield its URL and the process id of its JVM."""
    environment = {
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LAUNCHER_OPTS": SHORT_LIVED_JVM,
        "PYSPARK_PYTHON": sys.executable,
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
    with Program(log, *command, environment=environment) as server:
        started = re.compile(r"Connect server started at: .*?:(\d+)\s")
        server.wait_until(lambda: started.search(server.output()))
        (port,) = started.findall(server.output())
        yield f"sc://127.0.0.1:{port}", server.pid
