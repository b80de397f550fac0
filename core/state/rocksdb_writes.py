"""The order of a store's writes to its database.

A snapshot takes the owner's dirty entries away and leaves them here; the thread that uploads writes
them and makes the copy that it uploads. Whoever must write before that happens (the owner, when its
cache is full or at the next snapshot) does this first, so the copy never holds anything newer than
its barrier.

Invariants:
    writes reach the database in the order of the snapshots, and the owner's own after those pending
    a copy is made right after its snapshot's writes, under the same lock
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from onceflow.core.errors import StateError
from onceflow.core.state.rocksdb_database import Database
from onceflow.core.state.rocksdb_rows import Pair

PAIRS_A_SLICE = 512
"""Pairs written before the interpreter is offered to the thread that processes: about 0.2 ms."""
_YIELD_S = 50e-6


class PendingWrites:
    """What one snapshot has to write, and where its copy of the database goes."""

    def __init__(self, pairs: Callable[[], Sequence[Pair]], copy: Path) -> None:
        self.pairs = pairs
        self.copy = copy
        self.wanted = True
        """False once the snapshot is discarded: then the writes are still due, the copy is not."""


class WriteQueue:
    """Writes of one store; at most one snapshot's are outstanding."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._pending: PendingWrites | None = None
        self._closed = False

    @property
    def settled(self) -> bool:
        """Whether every snapshot's writes are in the database."""
        return self._pending is None

    def settle(self) -> None:
        """Return when every snapshot's writes are in the database and its copy is made."""
        if self._pending is not None or self._closed:
            with self._lock:
                self._settle(lambda pairs: pairs)

    def settle_in_background(self) -> None:
        """The same, letting the owner's thread run between: a little slower."""
        with self._lock:
            self._settle(_paced)

    def submit(self, pending: PendingWrites) -> None:
        """Leave a snapshot's writes to `settle`; the ones before are done first."""
        with self._lock:
            self._settle(lambda pairs: pairs)
            self._pending = pending

    def write(self, pairs: Sequence[Pair]) -> None:
        """Write the owner's `pairs`, sorted by key, after all that is pending."""
        with self._lock:
            self._settle(lambda pairs: pairs)
            self._database.write(pairs)

    def discard(self, pending: PendingWrites) -> None:
        """Delete the snapshot's copy, made or not."""
        with self._lock:
            pending.wanted = False
            shutil.rmtree(pending.copy, ignore_errors=True)

    def close(self) -> None:
        """Close the database once nobody writes; what is pending is lost. Safe to call twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._pending = None
                self._database.close()

    def _settle(self, paced: Callable[[Sequence[Pair]], Iterable[Pair]]) -> None:
        if self._closed:
            raise StateError("the state was closed while a snapshot of it was under way")
        pending = self._pending
        if pending is None:
            return
        self._database.write(paced(pending.pairs()))
        if pending.wanted:
            self._database.link_to(pending.copy)
        self._pending = None


def _paced(pairs: Sequence[Pair]) -> Iterator[Pair]:
    for start in range(0, len(pairs), PAIRS_A_SLICE):
        yield from pairs[start : start + PAIRS_A_SLICE]
        time.sleep(_YIELD_S)
