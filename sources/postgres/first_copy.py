"""The rule that joins the first copy of a table to the stream of its changes. Pure: no I/O.

The table is copied in chunks by ranges of its key, each in a transaction of its own. A chunk keeps
the snapshot of that transaction. A change is *contained* in the copy if its transaction is visible
in the snapshot of the chunk to which its key belongs. The stream leaves out contained changes and
passes on all others. So no change is lost and none is applied a second time.

    chunks      upper keys ascending; the last chunk of a finished copy has no upper key
    xid         the id of the top-level transaction, which also snapshots list
    `ends_at`   an LSN after the last snapshot: a transaction that commits later is visible in none

docs/decisions/0045-first-copy-by-snapshots-of-chunks.md has the proof.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

Key: TypeAlias = tuple[int | str, ...]
"""The values of a key, compared as Postgres compares them."""

_XID_COUNT = 1 << 32


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The transactions that a snapshot sees, as `pg_current_snapshot()` returns them."""

    xmin: int
    """Every transaction before it has ended."""
    xmax: int
    """No transaction from it on has ended."""
    active: frozenset[int]
    """The transactions between them that have not ended."""

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Return the snapshot in `xmin:xmax:xip,…`.

        Raises:
            ValueError: The text has another form.
        """
        xmin, xmax, active = text.split(":")
        return cls(
            int(xmin), int(xmax), frozenset(map(int, active.split(","))) if active else frozenset()
        )

    def has_ended_before(self, xid: int) -> bool:
        """Return True if every transaction before `xid` has ended; `xid` itself has ended."""
        return not any(active < xid for active in self.active)

    def sees(self, xid: int) -> bool:
        """Return True if the committed transaction `xid`, with its epoch, is visible."""
        return xid < self.xmin or (xid < self.xmax and xid not in self.active)


def widen_xid(xid: int, near: int) -> int:
    """Return the 64-bit id whose lower half is `xid` and that is nearest to `near`.

    The stream has ids without their epoch. All ids that a server uses at one time are within 2^31
    of each other.
    """
    distance = (xid - near) % _XID_COUNT
    if distance >= _XID_COUNT // 2:
        distance -= _XID_COUNT
    return near + distance


@dataclass(frozen=True, slots=True)
class Chunk:
    """A copied range of keys: above the previous chunk's upper key, up to its own."""

    upper: Key | None
    """The last key of the range, or None if the range has no end."""
    snapshot: str
    """The snapshot of the transaction that read the range, as Postgres writes it."""


@cache
def _parse(snapshot: str) -> Snapshot:
    return Snapshot.parse(snapshot)


@dataclass(frozen=True, slots=True)
class CopiedChunks:
    """The copied part of a table."""

    chunks: tuple[Chunk, ...] = ()
    ends_at: int = 0
    """An LSN after the last snapshot was taken."""
    rows: int = 0
    """The number of copied rows; only for people."""

    @property
    def is_finished(self) -> bool:
        """True if the whole table is copied."""
        return bool(self.chunks) and self.chunks[-1].upper is None

    @property
    def last_key(self) -> Key | None:
        """The key after which the copy continues; None at the beginning and at the end."""
        return self.chunks[-1].upper if self.chunks else None

    def extend(self, upper: Key | None, snapshot: str, lsn: int, rows: int = 0) -> CopiedChunks:
        """Return these chunks and the range up to `upper`, read in `snapshot`, taken before `lsn`.

        The range has `rows` rows. Neighbouring ranges of one snapshot become one chunk.
        """
        chunks = self.chunks
        if chunks and chunks[-1].snapshot == snapshot:
            chunks = chunks[:-1]
        return replace(
            self,
            chunks=(*chunks, Chunk(upper, snapshot)),
            ends_at=max(self.ends_at, lsn),
            rows=self.rows + rows,
        )

    def may_contain(self, commit_lsn: int) -> bool:
        """Return False if no chunk contains a transaction with this commit LSN."""
        return commit_lsn < self.ends_at

    def contains(self, xid: int, key: Key | None) -> bool:
        """Return True if the chunk of `key` contains transaction `xid`, which has no epoch.

        A table that was copied as a whole has one chunk, and needs no key.
        """
        return self._sees(self._chunk_of(key), xid)

    def contains_everywhere(self, xid: int) -> bool:
        """Return True if every chunk contains transaction `xid`."""
        return all(self._sees(chunk, xid) for chunk in self.chunks)

    def _chunk_of(self, key: Key | None) -> Chunk:
        if key is None:
            (only,) = self.chunks
            return only
        uppers: Sequence[Key] = [chunk.upper for chunk in self.chunks if chunk.upper is not None]
        return self.chunks[bisect_left(uppers, key)]

    def _sees(self, chunk: Chunk, xid: int) -> bool:
        snapshot = _parse(chunk.snapshot)
        return snapshot.sees(widen_xid(xid, snapshot.xmax))
