"""The rule that joins the first copy of a table to the stream of its changes. Pure: no I/O.

The table is copied in chunks by ranges of its key, each in a transaction of its own. A chunk keeps
the snapshot of that transaction. The table may be divided into ranges that are copied side by side;
each range is copied chunk after chunk.

A change is *contained* in the copy if its transaction is visible in the snapshot of the chunk to
which its key belongs. The stream leaves out contained changes and passes on all others. So no
change is lost and none is applied a second time.

    ranges      upper keys ascending; the last range has no upper key
    chunks      upper keys ascending; the last chunk of a finished range has the range's upper key
    xid         the id of the top-level transaction, which also snapshots list
    `ends_at`   an LSN after the last snapshot: a transaction that commits later is visible in none

docs/decisions/0045-first-copy-by-snapshots-of-chunks.md has the proof.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from typing import TypeAlias

KeyValue: TypeAlias = int | str | Decimal
Key: TypeAlias = tuple[KeyValue, ...]
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
class CopiedRange:
    """A range of keys that is copied by itself: above the previous range's upper key."""

    upper: Key | None
    """The last key of the range, or None if the range has no end."""
    chunks: tuple[Chunk, ...] = ()
    """The copied part of the range, by ascending keys."""

    @property
    def is_finished(self) -> bool:
        """True if the whole range is copied."""
        return bool(self.chunks) and self.chunks[-1].upper == self.upper

    def extend(self, upper: Key | None, snapshot: str) -> CopiedRange:
        """Return this range with a copied part up to `upper`, which was read in `snapshot`.

        Neighbouring parts of one snapshot become one chunk.
        """
        chunks = self.chunks
        if chunks and chunks[-1].snapshot == snapshot:
            chunks = chunks[:-1]
        return replace(self, chunks=(*chunks, Chunk(upper, snapshot)))


@dataclass(frozen=True, slots=True)
class CopiedChunks:
    """The copied part of a table."""

    ranges: tuple[CopiedRange, ...] = ()
    """The ranges by ascending keys; empty until they are planned. The last one has no end."""
    ends_at: int = 0
    """An LSN after the last snapshot was taken."""
    rows: int = 0
    """The number of copied rows; only for people."""
    key: tuple[str, ...] = ()
    """The columns of the upper keys with their orders; empty if there are no upper keys."""

    @property
    def is_finished(self) -> bool:
        """True if the whole table is copied."""
        return bool(self.ranges) and all(part.is_finished for part in self.ranges)

    @property
    def is_begun(self) -> bool:
        """True if a part of the table is copied."""
        return any(part.chunks for part in self.ranges)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks of all ranges, by ascending keys."""
        return tuple(chunk for part in self.ranges for chunk in part.chunks)

    @property
    def uppers(self) -> tuple[Key, ...]:
        """The upper keys of the chunks that have one."""
        return tuple(chunk.upper for chunk in self.chunks if chunk.upper is not None)

    @property
    def bounds(self) -> tuple[Key, ...]:
        """The upper keys of chunks and ranges, in no order; empty if no part is copied.

        The copy continues between these keys, so they must be keys of the table as it is now.
        """
        if not self.is_begun:
            return ()
        ends = (part.upper for part in self.ranges)
        return (*self.uppers, *(upper for upper in ends if upper is not None))

    def lower(self, at: int) -> Key | None:
        """Return the key after which the copy of range number `at` continues; None: at its first.

        A range in which nothing is copied begins after the upper key of the range before it.
        """
        if self.ranges[at].chunks:
            return self.ranges[at].chunks[-1].upper
        return self.ranges[at - 1].upper if at else None

    def divide(self, uppers: Sequence[Key], key: tuple[str, ...] = ()) -> CopiedChunks:
        """Return an empty copy whose ranges end at `uppers`, which ascend, and a last range."""
        ranges = (*map(CopiedRange, uppers), CopiedRange(None))
        return CopiedChunks(ranges, self.ends_at, key=key)

    def extend(
        self, at: int, upper: Key | None, snapshot: str, lsn: int, rows: int = 0
    ) -> CopiedChunks:
        """Return this copy with a part of range number `at` up to `upper`.

        The part has `rows` rows. It was read in `snapshot`, which was taken before `lsn`.
        """
        ranges = list(self.ranges)
        ranges[at] = ranges[at].extend(upper, snapshot)
        return CopiedChunks(tuple(ranges), max(self.ends_at, lsn), self.rows + rows, self.key)


class CopyFilter:
    """The filter that leaves out the changes that a finished copy contains."""

    def __init__(self, copied: CopiedChunks) -> None:
        assert copied.is_finished
        chunks = copied.chunks
        self._ends_at = copied.ends_at
        self._uppers = copied.uppers
        self._snapshots = [_parse(chunk.snapshot) for chunk in chunks]

    @property
    def needs_key(self) -> bool:
        """True if the chunk of a change depends on its key. A single chunk has every key."""
        return bool(self._uppers)

    def may_contain(self, commit_lsn: int) -> bool:
        """Return False if no chunk contains a transaction with this commit LSN."""
        return commit_lsn < self._ends_at

    def contains(self, xid: int, key: Key | None) -> bool:
        """Return True if the chunk of `key` contains transaction `xid`, which has no epoch.

        `key` may be None unless `needs_key`.
        """
        if key is None:
            (snapshot,) = self._snapshots
        else:
            snapshot = self._snapshots[bisect_left(self._uppers, key)]
        return _sees(snapshot, xid)

    def contains_everywhere(self, xid: int) -> bool:
        """Return True if every chunk contains transaction `xid`."""
        return all(_sees(snapshot, xid) for snapshot in self._snapshots)


def _sees(snapshot: Snapshot, xid: int) -> bool:
    return snapshot.sees(widen_xid(xid, snapshot.xmax))
