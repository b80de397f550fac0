"""A watch on the table of payments: the moments at which new rows become visible."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right

import psycopg
from typing_extensions import Self

_LOOK_S = 0.05
_IN_FLIGHT_S = 0.2
"""A commit that was under way at the strike may become visible so much later."""


class Flow:
    """Notes each rise of the highest visible id, by a connection that no strike cuts.

    Times are of the monotonic clock. A context manager.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._ended = threading.Event()
        self._times: list[float] = []
        self._ids: list[int] = []
        self._thread = threading.Thread(target=self._watch, name="scoreboard flow", daemon=True)

    @property
    def has_rows(self) -> bool:
        """True if a row was visible."""
        return bool(self._ids)

    def find_recovery_s(self, struck_at: float) -> float | None:
        """Return the seconds from a strike to the first row with an id above all before it."""
        before = bisect_right(self._times, struck_at + _IN_FLIGHT_S)
        if before == len(self._times):
            return None
        return self._times[before] - struck_at

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._ended.set()
        self._thread.join(10)

    def _watch(self) -> None:
        while not self._ended.is_set():
            try:
                with psycopg.connect(self._url, autocommit=True, connect_timeout=2) as connection:
                    while not self._ended.wait(_LOOK_S):
                        self._look(connection)
            except psycopg.OperationalError:
                # Postgres was killed, and is started again.
                self._ended.wait(_LOOK_S)

    def _look(self, connection: psycopg.Connection) -> None:
        row = connection.execute("SELECT max(id) FROM payments").fetchone()
        highest = None if row is None else row[0]
        if highest is not None and (not self._ids or highest > self._ids[-1]):
            self._times.append(time.monotonic())
            self._ids.append(int(highest))
