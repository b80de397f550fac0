"""Flink: the sinks of its JDBC connector, on a standalone cluster with high availability."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tests.support.program import Program

from benchmarks.scoreboard.contestant import Contestant, Deployment, NotRun, Place, Role, Say
from onceflow.integration.servers.kafka_jars import java_command
from onceflow.integration.servers.process import exclusive
from onceflow.integration.servers.server import free_port

FlinkLine = Literal["flink1", "flink2"]
FlinkWay = Literal["append", "upsert", "xa", "new-xa"]

_PROJECT = Path(__file__).parents[1] / "flink"
_VERSIONS: Mapping[FlinkLine, tuple[str, str]] = {
    "flink1": ("Flink 1.20.5", "flink-connector-jdbc 3.3.0-1.20"),
    "flink2": ("Flink 2.0.2", "flink-connector-jdbc 4.0.0-2.0"),
}
_DOCUMENTATION: Mapping[FlinkLine, str] = {
    "flink1": "https://nightlies.apache.org/flink/flink-docs-release-1.20/docs",
    "flink2": "https://nightlies.apache.org/flink/flink-docs-release-2.0/docs",
}
_BUILD_TIMEOUT_S = 600.0
_LOG_TAIL_CHARS = 2000
# Flink reads classes of the JDK by reflection.
_OPENED = tuple(
    f"--add-opens=java.base/{package}=ALL-UNNAMED"
    for package in ("java.lang", "java.util", "java.net", "java.nio", "java.time", "sun.nio.ch")
)


class Flink(Contestant):
    """A job manager, a task manager with two slots, and ZooKeeper."""

    def __init__(self, line: FlinkLine, flink_way: FlinkWay) -> None:
        self._line: FlinkLine = line
        self._flink_way: FlinkWay = flink_way
        self.name = f"{line}-{flink_way}"
        self.engine, connector = _VERSIONS[line]
        self.way = "upsert" if flink_way == "upsert" else "append"
        self.settings = (
            connector,
            "exactly-once checkpoints each second, hashmap state, high availability by ZooKeeper",
            "restart fixed-delay 1 s without end, heartbeat.interval 1 s, heartbeat.timeout 10 s",
            "batches of 1,000 rows, or of 200 ms where rows are written at least once",
        )
        self.links = (
            f"{_DOCUMENTATION[line]}/connectors/datastream/jdbc/",
            f"{_DOCUMENTATION[line]}/deployment/ha/zookeeper_ha/",
        )
        match flink_way:
            case "append":
                self.sink = "JdbcSink, INSERT, at least once"
                self.claim = "at least once"
            case "upsert":
                self.sink = "JdbcSink, INSERT … ON CONFLICT (id), at least once"
                self.claim = "at least once, effectively once by key"
            case "xa":
                call = "exactlyOnceSink" if line == "flink1" else "buildExactlyOnce"
                self.sink = f"JdbcSink.{call} (XA)"
                self.claim = "exactly once"
            case "new-xa":
                self.sink = "core.datastream.sink.JdbcSink, buildExactlyOnce (XA)"
                self.claim = "exactly once"
        if flink_way.endswith("xa"):
            self.settings = (
                *self.settings,
                "withMaxRetries(0), withTransactionPerConnection(true), as asked for Postgres",
                "totals by the at-least-once sink with ON CONFLICT",
            )

    @property
    def _target(self) -> Path:
        return _PROJECT / "target" / self._line

    def install(self, say: Say) -> None:
        """Build the job with Maven, which downloads Flink the first time."""
        jar = self._target / "scoreboard.jar"
        sources = [_PROJECT / "pom.xml", *_PROJECT.glob("*/onceflow/**/*.java")]
        (_PROJECT / "target").mkdir(exist_ok=True)
        with exclusive(_PROJECT / "target" / "lock", _BUILD_TIMEOUT_S):
            newest = max(path.stat().st_mtime for path in sources)
            if jar.exists() and jar.stat().st_mtime > newest:
                return
            say(f"    building the job of {self.engine}")
            try:
                built = subprocess.run(
                    ["mvn", "-q", "-B", "package", f"-P{self._line}"],
                    cwd=_PROJECT,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=_BUILD_TIMEOUT_S,
                )
            except FileNotFoundError as error:
                raise NotRun("Maven is not on the PATH") from error
        if built.returncode:
            output = (built.stdout + built.stderr)[-_LOG_TAIL_CHARS:]
            raise NotRun(f"`mvn package -P{self._line}` in {_PROJECT} failed:\n{output}")

    def deploy(self, place: Place) -> Deployment:
        """Return the cluster, to which the job is submitted once."""
        rest_port, zookeeper_port = free_port(), free_port()
        _write_configuration(place.directory, rest_port, zookeeper_port)

        def java(main: str, *arguments: object, heap: str = "512m") -> Sequence[object]:
            classes = os.pathsep.join([f"{self._target}/scoreboard.jar", f"{self._target}/lib/*"])
            level = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
            options = (f"-Xmx{heap}", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", level)
            return (java_command(), *options, *_OPENED, "-cp", classes, main, *arguments)

        runtime = "org.apache.flink.runtime"
        configuration = ("--configDir", place.directory)
        roles = [
            Role(
                "zookeeper",
                lambda: java(
                    f"{runtime}.zookeeper.FlinkZooKeeperQuorumPeer",
                    "--zkConfigFile",
                    place.directory / "zoo.cfg",
                    "--peerId",
                    "1",
                ),
            ),
            Role(
                "jobmanager",
                lambda: java(
                    f"{runtime}.entrypoint.StandaloneSessionClusterEntrypoint", *configuration
                ),
            ),
            Role(
                "taskmanager",
                lambda: java(
                    f"{runtime}.taskexecutor.TaskManagerRunner", *configuration, heap="1g"
                ),
            ),
        ]
        words = (place.directory, rest_port, self._flink_way)
        target = (place.bootstrap_servers, place.topic, place.jdbc_url)
        submission = java("onceflow.scoreboard.PaymentsJob", *words, *target)
        return _Cluster(roles, place.directory, submission)


class _Cluster(Deployment):
    def __init__(
        self, roles: Sequence[Role], directory: Path, submission: Sequence[object]
    ) -> None:
        super().__init__(roles, directory, coordinator="jobmanager", worker="taskmanager")
        self._submission = submission
        self._client: Program | None = None

    def supervise(self) -> None:
        """Start what has ended, and submit the job until a submission has succeeded.

        A submitted job is in ZooKeeper: a new job manager goes on with it.
        """
        super().supervise()
        if self._client is None or self._client.poll() not in (None, 0):
            log = self._directory / "submission.log"
            self._client = Program(log, *self._submission)

    def end(self) -> None:
        """SIGKILL the cluster."""
        super().end()
        if self._client is not None:
            self._client.end()


def _write_configuration(directory: Path, rest_port: int, zookeeper_port: int) -> None:
    settings = {
        "jobmanager.rpc.address": "127.0.0.1",
        "jobmanager.bind-host": "127.0.0.1",
        "jobmanager.memory.process.size": "1g",
        "rest.address": "127.0.0.1",
        "rest.port": rest_port,
        "rest.bind-port": rest_port,
        "taskmanager.host": "127.0.0.1",
        "taskmanager.bind-host": "127.0.0.1",
        "taskmanager.numberOfTaskSlots": 2,
        "taskmanager.cpu.cores": 2,
        "taskmanager.memory.task.heap.size": "512m",
        "taskmanager.memory.task.off-heap.size": "0m",
        "taskmanager.memory.framework.heap.size": "128m",
        "taskmanager.memory.framework.off-heap.size": "128m",
        "taskmanager.memory.network.min": "64m",
        "taskmanager.memory.network.max": "64m",
        "taskmanager.memory.managed.size": "16m",
        "taskmanager.memory.jvm-metaspace.size": "256m",
        "taskmanager.memory.jvm-overhead.min": "192m",
        "taskmanager.memory.jvm-overhead.max": "192m",
        "parallelism.default": 2,
        "heartbeat.interval": "1 s",
        "heartbeat.timeout": "10 s",
        "high-availability.type": "zookeeper",
        "high-availability.zookeeper.quorum": f"127.0.0.1:{zookeeper_port}",
        "high-availability.storageDir": f"file://{directory}/ha",
        "high-availability.cluster-id": "/scoreboard",
        "high-availability.zookeeper.client.session-timeout": "6 s",
        "execution.checkpointing.interval": "1 s",
        "execution.checkpointing.mode": "EXACTLY_ONCE",
        "execution.checkpointing.dir": f"file://{directory}/checkpoints",
        "execution.checkpointing.storage": "filesystem",
        "state.checkpoints.dir": f"file://{directory}/checkpoints",
        "state.backend.type": "hashmap",
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": 10_000,
        "restart-strategy.fixed-delay.delay": "1 s",
    }
    lines = [f"{name}: {value}\n" for name, value in settings.items()]
    for name in ("config.yaml", "flink-conf.yaml"):
        (directory / name).write_text("".join(lines))
    (directory / "zookeeper").mkdir()
    (directory / "zoo.cfg").write_text(
        f"tickTime=2000\ndataDir={directory}/zookeeper\nclientPort={zookeeper_port}\n"
        f"admin.enableServer=false\nserver.1=127.0.0.1:{free_port()}:{free_port()}\n"
    )
