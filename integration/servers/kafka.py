"""A real Apache Kafka broker in KRaft mode in one JVM, tuned to start and restart fast.

Topics are not created automatically: a misspelt topic is an error, as in production. Records are
not fsynced (Kafka's default), so they survive a crash of the broker, but not of the machine.

The module also has typed admin functions for tests and the demo.
"""

from __future__ import annotations

import base64
import hashlib
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewTopic

from onceflow.core.local_files import cache_directory, publish
from onceflow.integration.servers import process
from onceflow.integration.servers.kafka_jars import (
    KAFKA_VERSION,
    Progress,
    java_command,
    kafka_jars,
)
from onceflow.integration.servers.process import LOOPBACK

if TYPE_CHECKING:
    from confluent_kafka.admin._metadata import ClusterMetadata

_ANSWER_TIMEOUT_S = 2.0
_POLL_S = 0.02
_ARCHIVE_TIMEOUT_S = 120.0
_LATEST = cast("Callable[[], object]", OffsetSpec.latest)


class KafkaAdmin(Protocol):
    """The methods of confluent-kafka's AdminClient that are used here.

    Keep a reference to the client until its futures are done. A client that is garbage-collected
    drops them.
    """

    def list_topics(self, topic: str | None = ..., *, timeout: float) -> ClusterMetadata:
        """Return the brokers, topics and leaders that the broker knows."""
        ...

    def create_topics(
        self, new_topics: Sequence[NewTopic], *, operation_timeout: float
    ) -> dict[str, Future[None]]:
        """Create topics. Return a future for each."""
        ...

    def delete_topics(
        self, topics: Sequence[str], *, operation_timeout: float
    ) -> dict[str, Future[None]]:
        """Delete topics. Return a future for each."""
        ...

    def list_offsets(
        self,
        topic_partition_offsets: Mapping[TopicPartition, object],
        *,
        request_timeout: float,
    ) -> dict[TopicPartition, Future[object]]:
        """Ask the leader of each partition for an offset. Return a future for each."""
        ...


def admin_client(bootstrap_servers: str) -> KafkaAdmin:
    """Return an admin client that retries fast and prints nothing while the broker is down."""
    client = AdminClient(
        {
            "bootstrap.servers": bootstrap_servers,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 100,
            "socket.connection.setup.timeout.ms": 2000,
            "log_level": 0,
        }
    )
    return cast("KafkaAdmin", client)


def create_topic(
    bootstrap_servers: str,
    name: str,
    partitions: int,
    *,
    config: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float = 20.0,
) -> None:
    """Create topic `name`, and wait until each partition has a leader.

    Raises:
        ServerError: The topic already exists, or was not ready in time.
    """
    admin = admin_client(bootstrap_servers)
    topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(config))
    future = admin.create_topics([topic], operation_timeout=timeout_s)[name]
    deadline = time.monotonic() + timeout_s
    _await(future, f"topic {name} could not be created", timeout_s)
    # The controller has answered, but the broker becomes the leader a moment later.
    while not leaders_answer(admin, {name: partitions}):
        if time.monotonic() > deadline:
            raise process.ServerError(
                f"topic {name} has no leader {timeout_s:g} s after its creation"
            )
        time.sleep(_POLL_S)


def leaders_answer(admin: KafkaAdmin, partitions: Mapping[str, int]) -> bool:
    """Return True if each partition of `partitions` (topic -> count) is served by its leader."""
    asked = {
        TopicPartition(topic, partition): _LATEST()
        for topic, count in partitions.items()
        for partition in range(count)
    }
    if not asked:
        return True
    answers = admin.list_offsets(asked, request_timeout=_ANSWER_TIMEOUT_S)
    try:
        for answer in answers.values():
            answer.result(_ANSWER_TIMEOUT_S + 1)
    except (KafkaException, TimeoutError):
        return False
    return True


def delete_topics(bootstrap_servers: str, names: Sequence[str], *, timeout_s: float = 20.0) -> None:
    """Delete topics, and wait until the broker has accepted every deletion.

    Raises:
        ServerError: A topic does not exist, or the broker did not answer in time.
    """
    admin = admin_client(bootstrap_servers)
    for name, future in admin.delete_topics(names, operation_timeout=timeout_s).items():
        _await(future, f"topic {name} could not be deleted", timeout_s)


def _await(future: Future[None], failure: str, timeout_s: float) -> None:
    try:
        future.result(timeout_s)
    except (KafkaException, TimeoutError) as error:
        cause = error.args[0] if error.args else error
        reason = cause.str() if isinstance(cause, KafkaError) else str(cause)
        raise process.ServerError(f"{failure}: {reason}") from error


DEFAULT_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "auto.create.topics.enable": "false",
        # With one broker, a replication factor above 1 is never reached, and transactions cannot
        # start.
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "1",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        # A killed broker can only restart after its old registration has expired (default 9 s).
        "broker.session.timeout.ms": "1500",
        "broker.heartbeat.interval.ms": "300",
        # The broker looks for expired transactions this often (default 10 s).
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
        "log.cleaner.enable": "false",
    }
)
OWN_LISTENERS: Mapping[str, str] = MappingProxyType(
    {
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "BROKER",
        "listener.security.protocol.map": (
            "PLAINTEXT:PLAINTEXT,BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT"
        ),
    }
)
"""The settings for a separate listener of the broker, used if clients connect through a proxy or to
a container."""
DEFAULT_JVM_OPTIONS = ("-Xms256m", "-Xmx640m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""The JVM options for machines with few cores: no collector threads and no optimizing compiler."""

_LOG4J = """\
rootLogger=INFO, C
appender.C.type=Console
appender.C.name=C
appender.C.layout.type=PatternLayout
appender.C.layout.pattern=[%d] %p %m (%c)%n
"""


class EmbeddedKafka(process.ServerProcess):
    """A Kafka broker that is also its controller."""

    name: ClassVar[str] = "kafka"

    def __init__(
        self,
        options: Mapping[str, str] = MappingProxyType({}),
        directory: Path | None = None,
        *,
        version: str = KAFKA_VERSION,
        jvm_options: Sequence[str] = DEFAULT_JVM_OPTIONS,
        progress: Progress | None = None,
        proxied: bool = False,
    ) -> None:
        """Describe a broker. `start` or `with` runs it. Fetches the jars if they are not cached.

        Args:
            options: Settings of server.properties, over `DEFAULT_OPTIONS`.
            directory: As in `ServerProcess`.
            version: Kafka's version.
            jvm_options: The options for heap and collector.
            progress: Called with a message when the jars are fetched.
            proxied: As in `Server`. The broker connects to itself without the proxy, but `start`
                checks readiness through the proxy. So the network must work at `start`.
        """
        self._java = java_command()
        self._jars = kafka_jars(version, progress=progress)
        super().__init__(directory, proxied=proxied)
        self._options = {**DEFAULT_OPTIONS, **options}
        self._jvm_options = tuple(jvm_options)
        archive = _name_archive(version, self._java)
        if archive.is_file():
            self._jvm_options = (f"-XX:SharedArchiveFile={archive}", *self._jvm_options)
        self._controller_port = process.free_port()
        self._broker_port = process.free_port()
        self._admin: KafkaAdmin | None = None

    @property
    def bootstrap_servers(self) -> str:
        """The broker's address, for any client."""
        return _address(*self.client_address)

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        config: Mapping[str, str] = MappingProxyType({}),
        timeout_s: float = 20.0,
    ) -> str:
        """Create a topic, and wait until every partition has a leader. Return `name`.

        Raises:
            ServerError: The topic already exists, or was not ready in time.
        """
        create_topic(self.bootstrap_servers, name, partitions, config=config, timeout_s=timeout_s)
        return name

    @property
    def _properties(self) -> Path:
        return self.directory / "server.properties"

    @property
    def _cluster_id(self) -> str:
        return (self.directory / "cluster_id").read_text()

    def _initialize(self) -> None:
        (self.directory / "cluster_id").write_text(new_cluster_id())
        (self.directory / "log4j2.properties").write_text(_LOG4J)
        self._write_properties()
        self._run(
            self._java_main(
                "kafka.tools.StorageTool",
                *("format", "--cluster-id", self._cluster_id, "--config", str(self._properties)),
            )
        )

    def _command(self) -> Sequence[str | Path]:
        self._write_properties()
        return self._java_main("kafka.Kafka", str(self._properties))

    def _write_properties(self) -> None:
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{LOOPBACK}:{self._controller_port}",
            **self._listeners(),
            "log.dirs": str(self.directory / "data"),
            **self._options,
        }
        self._properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))

    def _listeners(self) -> dict[str, str]:
        controller = f"CONTROLLER://{LOOPBACK}:{self._controller_port}"
        direct = f"PLAINTEXT://{LOOPBACK}:{self.port}"
        if not self._proxied:
            return {
                "listeners": f"{direct},{controller}",
                "controller.listener.names": "CONTROLLER",
                "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            }
        broker = f"BROKER://{LOOPBACK}:{self._broker_port}"
        return {
            "listeners": f"{direct},{broker},{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap_servers},{broker}",
            **OWN_LISTENERS,
        }

    def _java_main(self, main: str, *arguments: str) -> list[str]:
        return [
            self._java,
            *self._jvm_options,
            f"-Dlog4j2.configurationFile={self.directory / 'log4j2.properties'}",
            *("-cp", f"{self._jars}/*", main, *arguments),
        ]

    def _is_ready(self) -> bool:
        if self._admin is None:
            self._admin = admin_client(self.bootstrap_servers)
        if not broker_is_ready(self._admin, self._cluster_id, self.bootstrap_servers):
            return False
        self._admin = None
        return True


def archive_classes() -> None:
    """Archive the broker's classes on this machine, which halves the time of each start.

    The first call runs a broker, for about ten seconds. Concurrent callers wait for it. If no
    archive can be written, brokers start without it.
    """
    archive = _name_archive(KAFKA_VERSION, java_command())
    if archive.parent.is_dir():
        return
    lock = archive.parent.with_name(f"{archive.parent.name}.lock")
    with process.exclusive(lock, 2 * _ARCHIVE_TIMEOUT_S):
        if not archive.parent.is_dir():
            with publish(archive.parent) as fresh:
                _write_archive(fresh / archive.name)


def _name_archive(version: str, java: str) -> Path:
    """Return the path of the class archive for this Java and this Kafka. It may not exist."""
    program = Path(java).resolve()
    key = hashlib.sha256(f"{program} {program.stat().st_mtime_ns}".encode()).hexdigest()[:12]
    return cache_directory() / f"kafka-{version}-classes-{key}" / "classes.jsa"


def _write_archive(archive: Path) -> None:
    written = archive.with_suffix(".new")
    with tempfile.TemporaryDirectory(prefix="onceflow-kafka-") as directory:
        writes = (*DEFAULT_JVM_OPTIONS, f"-XX:ArchiveClassesAtExit={written}")
        broker = EmbeddedKafka(directory=Path(directory), jvm_options=writes)
        broker.start()
        broker.create_topic("archived")
        began = time.monotonic()
        broker.stop(timeout_s=_ARCHIVE_TIMEOUT_S)
    # If the JVM had to be killed, the archive may be incomplete. Do not use it.
    if written.is_file() and time.monotonic() - began < _ARCHIVE_TIMEOUT_S:
        written.rename(archive)


def broker_is_ready(admin: KafkaAdmin, cluster_id: str, address: str) -> bool:
    """Return True if the broker is unfenced and every existing partition has a leader.

    Raises:
        ServerError: The broker belongs to another cluster than `cluster_id`.
    """
    try:
        cluster = admin.list_topics(timeout=1)
    except KafkaException:
        return False
    # The client's stubs declare it as None. In the protocol it is a string since Kafka 0.10.1.
    if str(cluster.cluster_id) != cluster_id:
        raise process.ServerError(
            f"{address} is answered by Kafka cluster {cluster.cluster_id}, not by {cluster_id}: "
            "another process took the port"
        )
    partitions = {name: len(topic.partitions) for name, topic in cluster.topics.items()}
    return bool(cluster.brokers) and leaders_answer(admin, partitions)


def new_cluster_id() -> str:
    """Return a random cluster id in the format of StorageTool."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # StorageTool would parse a leading dash as an option.
        if not text.startswith("-"):
            return text


def _address(host: str, port: int) -> str:
    return f"{host}:{port}"
