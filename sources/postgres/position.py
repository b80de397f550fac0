"""The position of a source in one slot, and its encoding in a split.

    {"slot":"onceflow_job_shop","system":"7350…","timeline":1,"lsn":"0/16B3748","cut":null,
     "as_of":1767225600000,
     "tables":[{"schema":"public","name":"orders","oid":16384,
                "published":"16390.750 16391.750","ahead":null,
                "copied":{"ends_at":"0/16B3700","rows":500,"key":["id number"],
                          "ranges":[[[500],[[[99],"10:20:"],…]],…]}},…]}

`lsn` is the end of the last transaction that was returned as a whole. Transactions that begin their
commit record at or after it are still to be read. `cut` is null, or the commit LSN of the next
transaction and the number of its changes that were returned: only a transaction over the limit is
cut. The number counts every change that the slot sends, also of tables that are not read. So the
number stays valid if the job reads other tables later.

Some tables may be ahead of this position: `ahead` is their own one, [lsn, cut]. They were read
while another table was copied that the job read later than them. `lsn` is the earliest position of
all tables. So `ahead` is at or after `lsn`, and the slot may move to `lsn`.

`copied` is null if the table was not copied or if the stream has passed the copy. Of a copy without
a stream, `slot` is empty, and `lsn` is 0/0. `as_of` and `rows` are only for people.

This is UTF-8 JSON in Split.position. It contains keys of rows, and no other values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

from onceflow.clients.postgres.catalog import literal
from onceflow.clients.postgres.replication import format_lsn, parse_lsn
from onceflow.clients.sql.tables import TableName
from onceflow.core.errors import StateIncompatible
from onceflow.core.spi import Split
from onceflow.sources.postgres.first_copy import Chunk, CopiedChunks, CopiedRange, Key, KeyValue

_COPY_ALONE = "copy"
"""The id of the split of a copy without a stream."""
COPY_ANEW = (
    "empty the target, and start the job under another name and with first_copy='all', which"
    " copies the table anew"
)
"""The advice for a user whose job cannot continue and has no slot any more.

With `first_copy="none"`, the new job would read neither the rows nor the changes until its start.
"""


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a large transaction that was returned."""

    commit_lsn: int
    changes: int


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A position in the changes that a slot sends."""

    lsn: int
    cut: Cut | None = None

    def includes(self, commit_lsn: int, index: int) -> bool:
        """Return True if change number `index` of a transaction is before this position."""
        if self.cut is not None and self.cut.commit_lsn == commit_lsn:
            return index <= self.cut.changes
        return commit_lsn < self.lsn

    def is_before(self, other: StreamPosition) -> bool:
        """Return True if there may be changes between this position and `other`."""
        return self.order < other.order

    @property
    def order(self) -> tuple[int, int]:
        """A value that is greater for a later position."""
        return (self.lsn, 0) if self.cut is None else (self.cut.commit_lsn, self.cut.changes)


@dataclass(frozen=True, slots=True)
class TablePosition:
    """A table that is read, and how far its first copy is."""

    name: TableName
    """The name with its schema; part of the position for errors."""
    oid: int
    copied: CopiedChunks | None
    """None if there is no first copy, or if the stream has passed it."""
    published: str = ""
    """The version of the publication when it got the table. Another version may have left out
    changes."""
    ahead: StreamPosition | None = None
    """The table's own position, if it is after that of the slot."""

    @property
    def is_copying(self) -> bool:
        """True if a part of the table is still to be copied."""
        return self.copied is not None and not self.copied.is_finished


@dataclass(frozen=True, slots=True)
class SlotPosition:
    """A position in the stream of one slot."""

    slot: str
    """The name of the slot; empty if the tables are copied and not followed."""
    system: str
    """The identifier of the cluster."""
    timeline: int
    lsn: int
    tables: tuple[TablePosition, ...]
    cut: Cut | None = None
    as_of_ms: int = 0
    """The server's time in milliseconds since 1970 at which nothing after `lsn` was committed yet.

    Only for people. 0 until the stream has begun.
    """

    @property
    def start(self) -> StreamPosition:
        """The earliest position of all tables, to which the slot may move."""
        return StreamPosition(self.lsn, self.cut)

    @property
    def furthest(self) -> StreamPosition:
        """The latest position of all tables. No later change has been returned."""
        ahead = (table.ahead for table in self.tables if table.ahead is not None)
        return max((self.start, *ahead), key=lambda at: at.order)

    @property
    def is_copying(self) -> bool:
        """True if a part of a table is still to be copied."""
        return any(table.is_copying for table in self.tables)

    @property
    def copy_anew(self) -> str:
        """The advice for a user whose job cannot continue from here: to copy the tables again."""
        if not self.slot:
            return (
                "Empty the target, and start the job under another name, which copies"
                " the table anew"
            )
        return f"Drop the slot ({drop_statement(self.slot)}), {COPY_ANEW}"

    def to_split(self) -> Split:
        """Return the split that holds this position."""
        fields = {
            "slot": self.slot,
            "system": self.system,
            "timeline": self.timeline,
            "lsn": format_lsn(self.lsn),
            "cut": _write_cut(self.cut),
            "as_of": self.as_of_ms,
            "tables": [_write_table(table) for table in self.tables],
        }
        return Split(self.slot or _COPY_ALONE, json.dumps(fields, separators=(",", ":")).encode())

    @classmethod
    def from_split(cls, split: Split) -> SlotPosition:
        """Return the position that `split` holds.

        Raises:
            StateIncompatible: The split does not belong to a source of Postgres changes.
        """
        try:
            fields = cast("Mapping[str, Any]", json.loads(split.position))
            return cls(
                slot=str(fields["slot"]),
                system=str(fields["system"]),
                timeline=int(fields["timeline"]),
                lsn=parse_lsn(fields["lsn"]),
                tables=tuple(map(_read_table, fields["tables"])),
                cut=_read_cut(fields["cut"]),
                as_of_ms=int(fields["as_of"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateIncompatible(
                f"split {split.id!r} of the checkpoint holds {split.position[:80]!r}, which does"
                " not read as a position in the changes of Postgres: it was written by another"
                " source. Give this source another uid, or start the job as it was"
            ) from error


def drop_statement(slot: str) -> str:
    """Return the statement that drops `slot`."""
    return f"SELECT pg_drop_replication_slot({literal(slot)})"


def _write_cut(cut: Cut | None) -> Sequence[object] | None:
    return None if cut is None else [format_lsn(cut.commit_lsn), cut.changes]


def _read_cut(cut: Sequence[Any] | None) -> Cut | None:
    return None if cut is None else Cut(parse_lsn(cut[0]), int(cut[1]))


def _write_table(table: TablePosition) -> Mapping[str, object]:
    ahead = table.ahead
    return {
        "schema": table.name.schema,
        "name": table.name.name,
        "oid": table.oid,
        "published": table.published,
        "ahead": None if ahead is None else [format_lsn(ahead.lsn), _write_cut(ahead.cut)],
        "copied": None if table.copied is None else _write_copy(table.copied),
    }


def _read_table(table: Mapping[str, Any]) -> TablePosition:
    ahead, copied = table["ahead"], table["copied"]
    return TablePosition(
        TableName(table["schema"], str(table["name"])),
        int(table["oid"]),
        None if copied is None else _read_copy(copied),
        str(table["published"]),
        None if ahead is None else StreamPosition(parse_lsn(ahead[0]), _read_cut(ahead[1])),
    )


def _write_copy(copied: CopiedChunks) -> Mapping[str, object]:
    return {
        "ends_at": format_lsn(copied.ends_at),
        "rows": copied.rows,
        "key": copied.key,
        "ranges": [
            [
                _write_key(part.upper),
                [[_write_key(chunk.upper), chunk.snapshot] for chunk in part.chunks],
            ]
            for part in copied.ranges
        ],
    }


def _read_copy(copied: Mapping[str, Any]) -> CopiedChunks:
    ranges = [
        CopiedRange(
            _read_key(upper),
            tuple(Chunk(_read_key(key), str(snapshot)) for key, snapshot in chunks),
        )
        for upper, chunks in copied["ranges"]
    ]
    return CopiedChunks(
        tuple(ranges),
        parse_lsn(copied["ends_at"]),
        int(copied["rows"]),
        tuple(map(str, copied["key"])),
    )


def _write_key(key: Key | None) -> Sequence[object] | None:
    """Return the key in JSON: a decimal number is an array with its text."""
    if key is None:
        return None
    return [[str(value)] if isinstance(value, Decimal) else value for value in key]


def _read_key(key: Sequence[Any] | None) -> Key | None:
    return None if key is None else tuple(map(_read_key_value, key))


def _read_key_value(value: Any) -> KeyValue:
    return value if isinstance(value, int | str) else Decimal(str(value[0]))
