"""The targets of the demo, and the state of a run as it is seen from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeAlias, cast

import sqlalchemy as sa
from confluent_kafka import Consumer, KafkaException, TopicPartition
from demo.settings import SinkKind
from sqlalchemy.exc import DBAPIError
from typing_extensions import Self, assert_never

from onceflow.integration import servers
from onceflow.integration.judge import Verdict, verify, verify_topic
from onceflow.integration.servers.mysql import MySQLAdmin
from onceflow.integration.workload import Payments

NAME = "ledger"
"""Of the table or topic."""
_DATABASE = "demo"
_INTERVAL_S = 0.1
# Asking takes at most this part of the time, so that it does not slow down what it watches.
_SHARE_MAX = 0.1
_ANSWER_TIMEOUT_S = 2
_JOIN_TIMEOUT_S = 30.0
_DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}

Question: TypeAlias = Callable[[], AbstractContextManager[Callable[[], int]]]
"""Connects, and gives what asks for a number."""


class KillableServer(Protocol):
    """A server, as far as a killer needs it."""

    @property
    def pid(self) -> int | None:
        """Its main process."""
        ...

    def kill(self) -> None:
        """SIGKILL it with all its processes."""
        ...

    def start(self) -> object:
        """Start it again on the same data and port."""
        ...


class Observer:
    """The last answer to one question, asked again and again on a thread beside the run.

    A server that is down leaves the answer as it was.
    """

    def __init__(self, name: str, question: Question) -> None:
        """Describe it; entering the context begins."""
        self._question = question
        self._value = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"demo {name}", daemon=True)

    @property
    def value(self) -> int:
        """The last answer, 0 before the first."""
        return self._value

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End, when no question is open any more."""
        self._ended.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            with suppress(KafkaException, DBAPIError, TimeoutError), self._question() as ask:
                rest_s = 0.0
                while not self._ended.wait(rest_s):
                    started_at = time.monotonic()
                    self._value = ask()
                    elapsed_s = time.monotonic() - started_at
                    rest_s = max(_INTERVAL_S, elapsed_s / _SHARE_MAX)


@dataclass(frozen=True, slots=True)
class DemoTarget:
    """A running server with a table or topic for the rows."""

    server: KillableServer
    """What a kill of the target kills."""
    address: str
    """What the sink is given to find the server, which is the demo's own: no secret."""
    visible_rows: Question
    """How many rows anybody sees."""
    judge: Callable[[Payments], Verdict]
    """What the target says of itself after a run. Raises `ConfigError` without a table or topic,
    and `NoVerdict` when the server does not answer."""


def start_target(
    kind: SinkKind,
    kafka: Future[servers.EmbeddedKafka],
    partitions: int,
    *,
    directory: Path,
    at_end: Callable[[Callable[[], None]], object],
    say: Callable[[str], None],
) -> DemoTarget:
    """Return the target once its server answers; it is stopped by what is given to `at_end`.

    Args:
        kind: Which.
        kafka: The broker of the payments, which may be starting still.
        partitions: Of a topic.
        directory: Of the demo's own.
        at_end: Takes what is to be called at the end, also when the start fails.
        say: Told when a server's program is fetched.

    Raises:
        ServerError: The server's program is not there, or does not start.
    """
    match kind:
        case SinkKind.POSTGRES:
            postgres = servers.EmbeddedPostgres()
            at_end(postgres.stop)
            return _table(postgres.start(), postgres.url)
        case SinkKind.MYSQL | SinkKind.MARIADB:
            server = servers.EmbeddedMySQL if kind is SinkKind.MYSQL else servers.EmbeddedMariaDB
            # A MariaDB that starts deletes other servers' work from a directory that it shares.
            temporary = directory / "tmp"
            temporary.mkdir()
            mysql = server({"tmpdir": str(temporary)}, progress=say)
            at_end(mysql.stop)
            mysql.start()
            with MySQLAdmin.session(mysql.url) as admin:
                admin.create_database(_DATABASE)
            return _table(mysql, mysql.database_url(_DATABASE))
        case SinkKind.KAFKA:
            broker = kafka.result()
            address, topic = broker.bootstrap_servers, broker.create_topic(NAME, partitions)
            return DemoTarget(
                broker,
                address,
                partial(_asking_kafka, address, "onceflow-demo-watcher", topic, partitions, _ends),
                partial(verify_topic, address, topic),
            )
        case _:
            assert_never(kind)


def observe_committed_records(
    bootstrap_servers: str, group: str, topic: str, partitions: int
) -> Observer:
    """Return how many records the job has committed for ever; the topic must begin at offset 0.

    They stand before the offsets that it publishes for its consumer group, after a checkpoint.
    """
    question = partial(_asking_kafka, bootstrap_servers, group, topic, partitions, _count_committed)
    return Observer("offsets", question)


def _table(server: KillableServer, url: str) -> DemoTarget:
    return DemoTarget(server, url, partial(_counting, url), partial(verify, url, NAME))


@contextmanager
def _counting(url: str) -> Generator[Callable[[], int]]:
    parsed = sa.make_url(url)
    engine = sa.create_engine(
        parsed.set(drivername=_DRIVERS[parsed.get_backend_name()]),
        poolclass=sa.NullPool,
        isolation_level="AUTOCOMMIT",
        connect_args={"connect_timeout": _ANSWER_TIMEOUT_S},
    )
    count = sa.select(sa.func.count()).select_from(sa.table(NAME))
    with engine.connect() as connection:
        yield lambda: connection.execute(count).scalar_one()


@contextmanager
def _asking_kafka(
    bootstrap_servers: str,
    group: str,
    topic: str,
    partitions: int,
    ask: Callable[[Consumer, list[TopicPartition]], int],
) -> Generator[Callable[[], int]]:
    settings = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": group,
        "isolation.level": "read_committed",
        "log_level": 0,
    }
    asked = [TopicPartition(topic, partition) for partition in range(partitions)]
    with closing(Consumer(settings)) as consumer:
        yield lambda: ask(consumer, asked)


def _count_committed(consumer: Consumer, partitions: list[TopicPartition]) -> int:
    answer = consumer.committed(partitions, timeout=_ANSWER_TIMEOUT_S)
    # A partition without a committed offset answers a negative one.
    return sum(max(0, partition.offset) for partition in answer)


def _ends(consumer: Consumer, partitions: list[TopicPartition]) -> int:
    """Return the offsets up to which a consumer gets: records, and a mark a transaction."""
    ends = [
        # None when it took too long, which the client's stubs do not say.
        cast(
            "tuple[int, int] | None",
            consumer.get_watermark_offsets(partition, timeout=_ANSWER_TIMEOUT_S),
        )
        for partition in partitions
    ]
    if None in ends:
        raise TimeoutError
    return sum(end[1] for end in ends if end is not None)
