"""The position of a source in one slot, and its encoding in a split.

    {"slot":"onceflow_job_orders","system":"7350…","timeline":1,"lsn":"0/16B3748","cut":null,
     "as_of":1767225600000,"tables":{"public.orders":{"oid":16384,"published":"16390.750 16391.750",
     "ends_at":"0/16B3700","rows":500,"chunks":[[[500],"10:20:"],…]}}}

`lsn` is the end of the last transaction that was returned as a whole. Transactions that begin their
commit record at or after it are still to be read. `cut` is null, or the commit LSN of the next
transaction and the number of its changes that were returned: only a transaction over the limit is
cut. `chunks` is null if the table was not copied or if the stream has passed the copy. `as_of` and
`rows` are only for people.

This is UTF-8 JSON in Split.position. It contains keys of rows, and no other values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from onceflow.clients.postgres.catalog import literal
from onceflow.clients.postgres.replication import format_lsn, parse_lsn
from onceflow.core.errors import StateIncompatible
from onceflow.core.spi import Split
from onceflow.sources.postgres.first_copy import Chunk, CopiedChunks


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a large transaction that was returned."""

    commit_lsn: int
    changes: int


@dataclass(frozen=True, slots=True)
class TablePosition:
    """A table that is read, and how far its first copy is."""

    name: str
    """The name with its schema; part of the position for errors."""
    oid: int
    copied: CopiedChunks | None
    """None if there is no first copy, or if the stream has passed it."""
    published: str = ""
    """The version of the publication when the slot was created. Another version may have left out
    changes."""

    @property
    def is_copying(self) -> bool:
        """True if a part of the table is still to be copied."""
        return self.copied is not None and not self.copied.is_finished


@dataclass(frozen=True, slots=True)
class SlotPosition:
    """A position in the stream of one slot."""

    slot: str
    system: str
    """The identifier of the cluster."""
    timeline: int
    lsn: int
    table: TablePosition
    cut: Cut | None = None
    as_of_ms: int = 0
    """The server's time in milliseconds since 1970 at which nothing after `lsn` was committed yet.

    Only for people. 0 until the stream has begun.
    """

    @property
    def copy_anew(self) -> str:
        """The advice for a user whose job cannot continue from here: to copy the table again."""
        return (
            f"Drop the slot (SELECT pg_drop_replication_slot({literal(self.slot)})), empty the"
            " target, and start the job with another uid of the source, which copies the table anew"
        )

    def to_split(self) -> Split:
        """Return the split that holds this position."""
        copied = self.table.copied
        table = {
            "oid": self.table.oid,
            "published": self.table.published,
            "ends_at": None if copied is None else format_lsn(copied.ends_at),
            "rows": 0 if copied is None else copied.rows,
            "chunks": None
            if copied is None
            else [[chunk.upper, chunk.snapshot] for chunk in copied.chunks],
        }
        fields = {
            "slot": self.slot,
            "system": self.system,
            "timeline": self.timeline,
            "lsn": format_lsn(self.lsn),
            "cut": None
            if self.cut is None
            else [format_lsn(self.cut.commit_lsn), self.cut.changes],
            "as_of": self.as_of_ms,
            "tables": {self.table.name: table},
        }
        return Split(self.slot, json.dumps(fields, separators=(",", ":")).encode())

    @classmethod
    def from_split(cls, split: Split) -> SlotPosition:
        """Return the position that `split` holds.

        Raises:
            StateIncompatible: The split does not belong to a source of Postgres changes.
        """
        try:
            fields = cast("Mapping[str, Any]", json.loads(split.position))
            cut = fields["cut"]
            ((name, table),) = fields["tables"].items()
            return cls(
                slot=str(fields["slot"]),
                system=str(fields["system"]),
                timeline=int(fields["timeline"]),
                lsn=parse_lsn(fields["lsn"]),
                table=TablePosition(
                    str(name), int(table["oid"]), _read_copied(table), str(table["published"])
                ),
                cut=None if cut is None else Cut(parse_lsn(cut[0]), int(cut[1])),
                as_of_ms=int(fields["as_of"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateIncompatible(
                f"split {split.id!r} of the checkpoint holds {split.position[:80]!r}, which does"
                " not read as a position in the changes of Postgres: it was written by another"
                " source. Give this source another uid, or start the job as it was"
            ) from error


def _read_copied(table: Mapping[str, Any]) -> CopiedChunks | None:
    if table["chunks"] is None:
        return None
    chunks = [
        Chunk(None if upper is None else tuple(upper), str(snapshot))
        for upper, snapshot in table["chunks"]
    ]
    return CopiedChunks(tuple(chunks), parse_lsn(table["ends_at"]), int(table["rows"]))
