"""A standalone cluster of Spark: a master and two workers with one core each, on this machine."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pyspark
from tests.support.program import Program

from onceflow.integration.servers.process import free_port

SPARK_HOME = Path(pyspark.__file__).parent
SHORT_LIVED_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Neither optimizing compiler nor collector threads: there are more JVMs here than cores."""
SPARK_JVM = os.environ.get("SPARK_SUBMIT_OPTS", SHORT_LIVED_JVM)
"""The same, and Spark's classes from an archive where there is one."""
_PACKAGE = "org.apache.spark.deploy"


class StandaloneCluster:
    """The cluster, whose master remembers its workers and sessions when it is started again."""

    def __init__(self, directory: Path) -> None:
        """Choose the master's port; nothing runs yet. Logs and work go to `directory`."""
        self._directory = directory
        self._port = free_port()
        self._master: Program | None = None
        self._workers: list[Program] = []
        self._starts = 0
        recovery = (
            "-Dspark.deploy.recoveryMode=FILESYSTEM"
            f" -Dspark.deploy.recoveryDirectory={directory / 'master'}"
        )
        self._environment = {
            # Executors find no more than their session gives them.
            "PYTHONPATH": None,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_NO_DAEMONIZE": "1",
            "SPARK_DAEMON_JAVA_OPTS": f"{SPARK_JVM} {recovery}",
            "SPARK_LAUNCHER_OPTS": SHORT_LIVED_JVM,
        }

    @property
    def url(self) -> str:
        """The master's URL, over all its starts."""
        return f"spark://127.0.0.1:{self._port}"

    def start_master(self) -> None:
        """Return once the master listens."""
        self._master = self._start("master", "master.Master", "--port", str(self._port))
        _await_line(self._master, "I have been elected leader")

    def kill_master(self) -> None:
        """Kill the master; workers and sessions are left alone."""
        if self._master is not None:
            self._master.kill()
            self._master = None

    def start_workers(self) -> None:
        """Return once two workers are registered."""
        for number in range(2):
            work = self._directory / f"work-{number}"
            options = ("--cores", "1", "--memory", "1g", "--work-dir", str(work), "--port", "0")
            worker = self._start(f"worker-{number}", "worker.Worker", *options, self.url)
            self._workers.append(worker)
            _await_line(worker, "Successfully registered with master")

    def kill_workers(self) -> None:
        """Kill the workers with their executors and all that those have started."""
        for worker in self._workers:
            worker.kill_tree()
        self._workers.clear()

    def end(self) -> None:
        """End everything. Idempotent."""
        self.kill_workers()
        self.kill_master()

    def _start(self, name: str, entry: str, *options: str) -> Program:
        self._starts += 1
        log = self._directory / f"{name}-{self._starts}.log"
        spark_class = SPARK_HOME / "bin" / "spark-class"
        host = ("--host", "127.0.0.1", "--webui-port", "0")
        command: list[str | Path] = [spark_class, f"{_PACKAGE}.{entry}", *host, *options]
        return Program(log, *command, environment=self._environment)


def _await_line(program: Program, text: str) -> None:
    program.wait_until(lambda: text in program.output(), 60)


@contextmanager
def standalone_cluster(directory: Path) -> Generator[StandaloneCluster, None, None]:
    """Run master and workers for as long as the context lasts."""
    cluster = StandaloneCluster(directory)
    try:
        cluster.start_master()
        cluster.start_workers()
        yield cluster
    finally:
        cluster.end()
