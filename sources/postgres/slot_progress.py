"""The distance of a slot from the end of the server's WAL, and warnings before the slot is lost.

The server keeps all WAL from the slot's restart position on. A limit on that WAL, or on the time
that a slot is unused, makes the server invalidate the slot. The changes after it are then lost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from onceflow.clients.postgres.catalog import literal
from onceflow.clients.postgres.connection import PostgresSession
from onceflow.clients.postgres.replication import format_lsn, parse_lsn
from onceflow.core.spi import CopyProgress, SourceProgress, SourceWarning
from onceflow.sources.postgres.position import SlotPosition, TablePosition

SAFE_SHARE_MIN = 0.25
"""The share of max_slot_wal_keep_size that should be left."""
_MB = 1024 * 1024
# Columns that older servers lack are read from the row as JSON: safe_wal_size is there since 13,
# inactive_since since 17, idle_replication_slot_timeout since 18.
_SLOT = """
    SELECT (CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
                 ELSE pg_catalog.pg_current_wal_lsn() END)::text,
           (extract(epoch FROM pg_catalog.clock_timestamp()) * 1000)::bigint,
           s.restart_lsn::text, s.confirmed_flush_lsn::text, s.wal_status, s.safe_wal_size,
           s.active,
           to_jsonb(s) ->> 'invalidation_reason',
           (extract(epoch FROM pg_catalog.clock_timestamp()
                - (to_jsonb(s) ->> 'inactive_since')::timestamptz))::float8,
           (SELECT setting::bigint FROM pg_catalog.pg_settings
            WHERE name = 'max_slot_wal_keep_size'),
           (SELECT setting::float8 FROM pg_catalog.pg_settings
            WHERE name = 'idle_replication_slot_timeout')
    FROM pg_catalog.pg_replication_slots AS s WHERE s.slot_name = {slot}
"""
# A partitioned table has no rows of its own. -1 means that no table was ever analyzed.
_ESTIMATES = """
    SELECT r.oid::bigint,
           (SELECT CASE WHEN bool_or(c.reltuples >= 0) THEN sum(greatest(c.reltuples, 0)) END
            FROM pg_catalog.pg_class AS c
            WHERE c.oid = r.oid AND c.relkind <> 'p'
               OR c.oid IN (SELECT l.relid FROM pg_catalog.pg_partition_tree(r.oid) AS l
                            WHERE l.isleaf))::bigint
    FROM pg_catalog.pg_class AS r WHERE r.oid IN ({oids})
"""


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """The state of a slot as the server describes it now."""

    name: str
    wal_end: int
    """The LSN of the end of the server's WAL."""
    server_ms: int
    """The server's time in milliseconds since 1970."""
    restart: int | None
    """The LSN from which on the server keeps WAL; None if it keeps nothing."""
    confirmed: int | None
    wal_status: str
    safe_bytes: int | None
    """The number of bytes that can be written before the slot may be lost; None without a limit."""
    is_active: bool
    invalidation: str
    """The reason why the slot is lost; empty if it is not."""
    inactive_s: float | None
    """The time since which no reader uses the slot."""
    wal_limit_bytes: int | None
    """The server's max_slot_wal_keep_size; None if there is no limit."""
    idle_limit_s: float | None
    """The server's idle_replication_slot_timeout; None if there is no limit."""

    @property
    def retained_bytes(self) -> int | None:
        """The number of bytes of WAL that the server keeps for the slot."""
        return None if self.restart is None else max(0, self.wal_end - self.restart)

    def list_warnings(self, *, is_copying: bool = False) -> Iterator[SourceWarning]:
        """Yield at most one warning about WAL and one about an unused slot.

        `is_copying` is True if a first copy is not finished, during which the slot does not move.
        """
        kept = f"slot {self.name} makes the server keep {_show(self.retained_bytes or 0)} of WAL"
        advice = (
            "The slot moves when the first copy is finished"
            if is_copying
            else "Find out why the slot does not move: a checkpoint that does not complete, or a"
            " target that is slow"
        )
        limit = self.wal_limit_bytes
        if self.invalidation or self.wal_status == "lost":
            reason = self.invalidation or "wal_removed"
            text = f"slot {self.name} is lost ({reason}): the job cannot continue after it ends"
            yield SourceWarning("lost", text)
        elif self.wal_status == "unreserved":
            text = (
                f"{kept}, more than max_slot_wal_keep_size: the next checkpoint of the server may"
                " delete the slot's WAL, and changes are lost. Raise it at once: ALTER SYSTEM SET"
                f" max_slot_wal_keep_size = '{_suggest(self.retained_bytes or 0)}'; SELECT"
                " pg_reload_conf()"
            )
            yield SourceWarning("unreserved", text)
        elif limit and self.safe_bytes is not None and self.safe_bytes < SAFE_SHARE_MIN * limit:
            text = (
                f"{kept}: after {_show(self.safe_bytes)} more the slot may be lost, because"
                f" max_slot_wal_keep_size is {_show(limit)}. {advice}; or raise the limit"
            )
            yield SourceWarning("nearly lost", text)
        elif self.wal_status == "extended":
            bound = "without a limit" if limit is None else f"up to {_show(limit)}"
            yield SourceWarning("extended", f"{kept}, more than max_wal_size, {bound}. {advice}")
        idle, idle_limit = self.inactive_s, self.idle_limit_s
        if idle is not None and idle_limit is not None and idle > idle_limit / 2:
            text = (
                f"no reader has used slot {self.name} for {idle:.0f} s, and the server gives it up"
                f" after {idle_limit:.0f} s (idle_replication_slot_timeout). A first copy does not"
                " use the slot: raise the limit until the copy is finished"
            )
            yield SourceWarning("idle", text)


def read_slot(session: PostgresSession, name: str) -> SlotFacts | None:
    """Return the facts of slot `name`, or None if there is none."""
    rows = session.query(_SLOT.format(slot=literal(name)))
    if not rows:
        return None
    (row,) = rows
    wal_end, server_ms, restart, confirmed, wal_status, safe, is_active = row[:7]
    invalidation, inactive_s, wal_limit_mb, idle_limit_s = row[7:]
    return SlotFacts(
        name,
        parse_lsn(str(wal_end)),
        int(server_ms),
        None if restart is None else parse_lsn(str(restart)),
        None if confirmed is None else parse_lsn(str(confirmed)),
        str(wal_status or ""),
        None if safe is None else int(safe),
        bool(is_active),
        str(invalidation or ""),
        None if inactive_s is None else float(inactive_s),
        None if wal_limit_mb is None or wal_limit_mb < 0 else int(wal_limit_mb) * _MB,
        float(idle_limit_s) if idle_limit_s else None,
    )


def measure_position(
    session: PostgresSession,
    position: SlotPosition,
    *,
    chunk_rows: int,
    in_chunks: Collection[str],
) -> SourceProgress:
    """Return the distance of `position` from the end of the server's WAL.

    `in_chunks` are the tables that are copied in chunks of `chunk_rows` rows.
    """
    copies = tuple(
        _measure_copies(session, position.tables, chunk_rows=chunk_rows, in_chunks=in_chunks)
    )
    if not position.slot:
        return SourceProgress(copies=copies)
    slot = read_slot(session, position.slot)
    if slot is None:
        warning = SourceWarning("missing", f"slot {position.slot} does not exist any more")
        return SourceProgress(copies=copies, warnings=(warning,))
    lag_bytes = max(0, slot.wal_end - position.lsn)
    lag_s: float | None = None
    if position.as_of_ms:
        lag_s = max(0, slot.server_ms - position.as_of_ms) / 1000 if lag_bytes else 0.0
    return SourceProgress(
        lag_bytes=lag_bytes,
        lag_s=lag_s,
        retained_bytes=slot.retained_bytes,
        retained_from="" if slot.confirmed is None else format_lsn(slot.confirmed),
        copies=copies,
        warnings=tuple(slot.list_warnings(is_copying=bool(copies))),
    )


def _measure_copies(
    session: PostgresSession,
    tables: Collection[TablePosition],
    *,
    chunk_rows: int,
    in_chunks: Collection[str],
) -> Iterator[CopyProgress]:
    copying = [table for table in tables if table.is_copying]
    if not copying:
        return
    oids = ", ".join(str(table.oid) for table in copying)
    estimates = dict(session.query(_ESTIMATES.format(oids=oids)))
    for table in copying:
        copied, expected = table.copied, estimates.get(table.oid)
        assert copied is not None
        # The position joins neighbouring chunks of equal snapshots, so their number says little.
        chunks = math.ceil(copied.rows / chunk_rows)
        chunks_expected: int | None = None
        if str(table.name) not in in_chunks:
            chunks = len(copied.chunks)
        elif expected is not None:
            chunks_expected = max(1, math.ceil(expected / chunk_rows))
        yield CopyProgress(str(table.name), copied.rows, chunks, expected, chunks_expected)


def _show(size: int) -> str:
    """Return a size in the units that Postgres's settings call kB, MB, GB and TB."""
    for unit, factor in (("TiB", _MB * _MB), ("GiB", 1024 * _MB), ("MiB", _MB)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size / 1024:.3g} KiB"


def _suggest(retained_bytes: int) -> str:
    """Return a limit of twice the retained WAL, as a setting."""
    return f"{max(1, math.ceil(2 * retained_bytes / _MB))}MB"
