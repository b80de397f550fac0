"""A standalone cluster of Spark: a master and two workers with one core each, on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyspark

REPOSITORY = Path(__file__).parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
SHORT_LIVED_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Neither optimizing compiler nor collector threads: there are more JVMs here than cores."""
SPARK_JVM = os.environ.get("SPARK_SUBMIT_OPTS", SHORT_LIVED_JVM)
"""The same, and Spark's classes from an archive where there is one."""


def spawn(
    command: Sequence[str | Path], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start `command` in the repository, with its output in `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT
        )


@contextmanager
def standalone_cluster(directory: Path) -> Generator[str, None, None]:
    """Run it for as long as the context lasts; yield the master's URL."""
    environment = os.environ | {
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_NO_DAEMONIZE": "1",
        "SPARK_DAEMON_JAVA_OPTS": SPARK_JVM,
        "SPARK_LAUNCHER_OPTS": SHORT_LIVED_JVM,
    }
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> Path:
        log = directory / f"{name}.log"
        spark_class = SPARK_HOME / "bin" / "spark-class"
        processes.append(spawn([spark_class, *arguments], log, environment))
        return log

    def await_line(log: Path, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + 60
        while not (match := re.search(pattern, log.read_text())):
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.05)
        return match

    package = "org.apache.spark.deploy"
    host = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    try:
        master = start("master", f"{package}.master.Master", *host)
        url = await_line(master, r"Starting Spark master at (spark://\S+)")[1]
        for number in range(2):
            work = (
                "--cores",
                "1",
                "--memory",
                "1g",
                "--work-dir",
                str(directory / f"work-{number}"),
            )
            worker = start(f"worker-{number}", f"{package}.worker.Worker", *host, *work, url)
            await_line(worker, "Successfully registered with master")
        yield url
    finally:
        for process in processes:
            process.terminate()
            process.wait(60)
