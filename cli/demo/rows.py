"""How many rows the table shows, asked again and again beside the run."""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType

import psycopg
from psycopg import sql
from typing_extensions import Self

_INTERVAL_S = 0.2
# Counting takes at most this part of the time, so that it does not slow down what it watches.
_SHARE_MAX = 0.1
_CONNECT_TIMEOUT_S = 2
_JOIN_TIMEOUT_S = 30.0


class VisibleRows:
    """The last count of the table's rows; a database that is down leaves the count as it was."""

    def __init__(self, url: str, table: str) -> None:
        """Describe what is counted; entering the context begins."""
        self._url = url
        self._query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(*table.split(".")))
        self._count = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="onceflow-demo-rows", daemon=True)

    @property
    def count(self) -> int:
        """Rows at the last look, 0 before the table exists."""
        return self._count

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
        """End, when no query is running any more."""
        self._ended.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            # A database that is down or refuses is asked again: it may be the one being killed.
            with (
                contextlib.suppress(psycopg.Error),
                psycopg.connect(
                    self._url, autocommit=True, connect_timeout=_CONNECT_TIMEOUT_S
                ) as connection,
            ):
                self._count_with(connection)

    def _count_with(self, connection: psycopg.Connection) -> None:
        while not self._ended.is_set():
            started = time.monotonic()
            with contextlib.suppress(psycopg.errors.UndefinedTable):
                row = connection.execute(self._query).fetchone()
                self._count = 0 if row is None else int(row[0])
            elapsed_s = time.monotonic() - started
            self._ended.wait(max(_INTERVAL_S, elapsed_s / _SHARE_MAX))
