"""A standalone cluster of Spark: a master and two workers with one core each, on this machine."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyspark
from tests.support.program import Program

from onceflow.integration.servers.process import free_port

SPARK_HOME = Path(pyspark.__file__).parent
SHORT_LIVED_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Neither optimizing compiler nor collector threads: there are more JVMs here than cores."""
SPARK_JVM = os.environ.get("SPARK_SUBMIT_OPTS", SHORT_LIVED_JVM)
"""The same, and Spark's classes from an archive where there is one."""
_START_TIMEOUT_S = 180
_PACKAGE = "org.apache.spark.deploy"


@dataclass(frozen=True, slots=True)
class ClusterHost:
    """A host on which a process of the cluster runs."""

    address: str
    prefix: tuple[str, ...] = ()
    """The command before a command that is to run there."""


_LOOPBACK = ClusterHost("127.0.0.1")


class StandaloneCluster:
    """The cluster, whose master remembers its workers and sessions when it is started again."""

    def __init__(
        self,
        directory: Path,
        master_host: ClusterHost = _LOOPBACK,
        worker_hosts: Sequence[ClusterHost] = (_LOOPBACK, _LOOPBACK),
        *,
        cores: int = 1,
    ) -> None:
        """Choose the master's port; nothing runs yet. Logs and work go to `directory`.

        `cores` is the number of each worker's cores.
        """
        self._directory = directory
        self._master_host = master_host
        self._worker_hosts = worker_hosts
        self._cores = cores
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
            "SPARK_NO_DAEMONIZE": "1",
            "SPARK_DAEMON_JAVA_OPTS": f"{SPARK_JVM} {recovery}",
            "SPARK_LAUNCHER_OPTS": SHORT_LIVED_JVM,
        }

    @property
    def url(self) -> str:
        """The master's URL, over all its starts."""
        return f"spark://{self._master_host.address}:{self._port}"

    def start_master(self) -> None:
        """Return once the master listens."""
        self._master = self._start(
            self._master_host, "master", "master.Master", "--port", str(self._port)
        )
        _await_line(self._master, "I have been elected leader")

    def kill_master(self) -> None:
        """Kill the master; workers and sessions are left alone."""
        if self._master is not None:
            self._master.kill()
            self._master = None

    def start_workers(self) -> None:
        """Return once the workers are registered."""
        for number, host in enumerate(self._worker_hosts):
            work = self._directory / f"work-{number}"
            size = ("--cores", str(self._cores), "--memory", f"{self._cores}g")
            options = (*size, "--work-dir", str(work), "--port", "0", self.url)
            self._workers.append(self._start(host, f"worker-{number}", "worker.Worker", *options))
        for worker in self._workers:
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

    def _start(self, host: ClusterHost, name: str, entry: str, *options: str) -> Program:
        self._starts += 1
        log = self._directory / f"{name}-{self._starts}.log"
        spark_class = SPARK_HOME / "bin" / "spark-class"
        address = ("--host", host.address, "--webui-port", "0")
        return Program(
            log,
            *(*host.prefix, spark_class, f"{_PACKAGE}.{entry}", *address, *options),
            environment={**self._environment, "SPARK_LOCAL_IP": host.address},
        )


def _await_line(program: Program, text: str) -> None:
    program.wait_until(lambda: text in program.output(), _START_TIMEOUT_S)


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
