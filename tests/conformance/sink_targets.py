"""Our own sinks' targets: each asks its server itself what a reader sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import psycopg
import pyarrow as pa
from psycopg import sql

from onceflow.core.protocol.committables import Committable
from onceflow.core.spi import Sink
from onceflow.core.staging import is_staged
from onceflow.integration.conformance import NotTestable, SinkTarget
from onceflow.integration.conformance.target import ROWS
from onceflow.sinks import PostgresSink

PASSWORD = "hunter2-of-the-kit"


class Killable(Protocol):
    """A server that a test may kill: its own, never the shared one."""

    port: int

    def kill(self) -> None: ...

    def start(self) -> object: ...

    def pause(self) -> None: ...

    def unpause(self) -> None: ...


class ServerTarget(SinkTarget):
    """What all targets on a server of the test run share."""

    server: Killable

    def kill(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.start()

    def pause(self) -> None:
        self.server.pause()

    def unpause(self) -> None:
        self.server.unpause()

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.server.port


class PostgresTarget(ServerTarget):
    """The table `rows` in one database of a Postgres server."""

    def __init__(
        self,
        server: Killable,
        database: str,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.server = server
        self._database = database
        self._settings = settings

    def sink(self) -> Sink:
        return self.sink_at(*self.address())

    def sink_at(self, host: str, port: int) -> Sink:
        return PostgresSink(
            f"postgresql://postgres:{PASSWORD}@{host}:{port}/{self._database}",
            table="rows",
            create=True,
            primary_key=("id",),
            **self._settings,
        )

    def rows(self) -> list[dict[str, object]]:
        with psycopg.connect(self._url) as connection:
            try:
                cursor = connection.execute("SELECT id, account, amount FROM rows")
            except psycopg.errors.UndefinedTable:
                return []
            return [dict(zip(ROWS.names, row, strict=True)) for row in cursor]

    def bad_batch(self, ids: Sequence[int]) -> pa.RecordBatch:
        return self.batch([*ids, ids[0]])

    def secrets(self) -> Sequence[str]:
        return [PASSWORD]

    def lose(self, committable: Committable) -> None:
        if is_staged(committable):
            raise NotTestable("staged rows are files of the checkpoint storage")
        with psycopg.connect(self._url, autocommit=True) as connection:
            name = sql.Literal(str(committable.transaction))
            connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(name))

    @property
    def _url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.server.port}/{self._database}"
