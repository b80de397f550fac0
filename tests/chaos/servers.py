"""The servers of all schedules of a run: a broker, a Postgres and a MySQL behind proxies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from tests.chaos.changes import create_table, draw_changes
from tests.chaos.job import JobSpec, SinkSpec
from tests.chaos.schedule import Schedule, SinkKind
from typing_extensions import Self, assert_never

from onceflow.integration.servers.kafka import EmbeddedKafka
from onceflow.integration.servers.mysql import EmbeddedMySQL, MySQLAdmin
from onceflow.integration.servers.postgres import EmbeddedPostgres, create_database
from onceflow.integration.servers.server import ServerError

AnyServer: TypeAlias = EmbeddedKafka | EmbeddedPostgres | EmbeddedMySQL


class Servers:
    """The servers, which each schedule may kill and must leave running. A context manager."""

    def __init__(self, say: Callable[[str], None], *, with_mysql: bool = True) -> None:
        """Describe them. Entering the context starts them."""
        self._say = say
        self._with_mysql = with_mysql
        self._stack = ExitStack()
        self.by_name: dict[str, AnyServer] = {}

    @property
    def has_mysql(self) -> bool:
        """True if there is a MySQL: its program is not on every machine."""
        return "mysql" in self.by_name

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports at which clients reach the servers."""
        return tuple(server.client_address[1] for server in self.by_name.values())

    @property
    def _kafka(self) -> EmbeddedKafka:
        server = self.by_name["kafka"]
        assert isinstance(server, EmbeddedKafka)
        return server

    @property
    def _postgres(self) -> EmbeddedPostgres:
        server = self.by_name["postgres"]
        assert isinstance(server, EmbeddedPostgres)
        return server

    def __enter__(self) -> Self:
        kinds: dict[str, Callable[[], AnyServer]] = {
            "kafka": lambda: EmbeddedKafka(proxied=True, progress=self._say),
            "postgres": lambda: EmbeddedPostgres({"wal_level": "logical"}, proxied=True),
        }
        if self._with_mysql:
            kinds["mysql"] = lambda: EmbeddedMySQL(proxied=True, progress=self._say)
        with ThreadPoolExecutor(max_workers=len(kinds)) as pool:
            started = {name: pool.submit(self._start, make) for name, make in kinds.items()}
        for name, future in started.items():
            try:
                self.by_name[name] = future.result()
            except ServerError as error:
                if name != "mysql":
                    self._stack.close()
                    raise
                self._say(f"no schedule writes to MySQL: {error}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def prepare(self, schedule: Schedule, name: str, directory: Path) -> JobSpec:
        """Create the topics, databases and directories of a schedule; return its job.

        `name` is unique among the schedules of these servers.
        """
        source_url, count = "", 1 if schedule.graph == "running" else 2
        if schedule.graph == "changes":
            source_url, count = self._create_source(schedule, f"{name}_source"), 0
        topics = tuple(f"{name}-{number}" for number in range(count))
        for topic in topics:
            self._kafka.create_topic(topic, schedule.partitions)
        created: dict[str, str] = {}
        sinks = tuple(
            self._make_sink(kind, f"{name}_{number}", directory, created)
            for number, kind in enumerate(schedule.sinks)
        )
        for folder in ("disk", "scratch", "calls", "savepoints"):
            (directory / folder).mkdir(exist_ok=True)
        return JobSpec(
            graph=schedule.graph,
            bootstrap_servers=self._kafka.bootstrap_servers,
            topics=topics,
            source_url=source_url,
            sinks=sinks,
            storage=str(directory / "disk" / "checkpoints"),
            failing_calls=str(directory / "calls"),
            scratch=str(directory / "scratch"),
            status_path="",
            stop_path=str(directory / "stop"),
            drained_path=str(directory / "drained"),
            savepoints=str(directory / "savepoints"),
            parallelism=schedule.parallelism,
            backend=schedule.backend,
            unaligned=schedule.unaligned,
            interval_s=schedule.interval_s,
            at_least_once=schedule.at_least_once,
            broken=schedule.broken,
        )

    def _create_source(self, schedule: Schedule, database: str) -> str:
        create_database(self._postgres.url, database)
        url = self._postgres.database_url(database)
        create_table(url, draw_changes(schedule))
        return url

    def _start(self, make: Callable[[], AnyServer]) -> AnyServer:
        server = make()
        self._stack.callback(server.stop)
        return server.start()

    def _make_sink(
        self, kind: SinkKind, target: str, directory: Path, created: dict[str, str]
    ) -> SinkSpec:
        match kind:
            case SinkKind.POSTGRES | SinkKind.POSTGRES_LEDGER:
                if "postgres" not in created:
                    create_database(self._postgres.url, target)
                    created["postgres"] = self._postgres.database_url(target)
                return SinkSpec(kind, created["postgres"], target)
            case SinkKind.MYSQL | SinkKind.MYSQL_LEDGER:
                mysql = self.by_name["mysql"]
                assert isinstance(mysql, EmbeddedMySQL)
                if "mysql" not in created:
                    with MySQLAdmin.session(mysql.url) as admin:
                        admin.create_database(target)
                    created["mysql"] = mysql.database_url(target)
                return SinkSpec(kind, created["mysql"], target)
            case SinkKind.KAFKA:
                self._kafka.create_topic(target, 2)
                return SinkSpec(kind, self._kafka.bootstrap_servers, target)
            case SinkKind.FILES | SinkKind.ICEBERG:
                folder = directory / target
                folder.mkdir()
                return SinkSpec(kind, str(folder), f"chaos.{target}")
            case _:
                assert_never(kind)
