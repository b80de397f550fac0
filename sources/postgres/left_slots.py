"""The slots that sources of changes have created in a database, and their removal.

A job that was deleted leaves its slot and its publication behind, and the server keeps all WAL for
the slot. Nothing in the server says which job a slot belonged to: only its name, and the reader
while one is connected.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from onceflow.clients.postgres.catalog import literal
from onceflow.clients.postgres.connection import PostgresSession
from onceflow.clients.sql.session import StatementRefused
from onceflow.core.errors import ConfigError, OffsetOutOfRange, StateIncompatible
from onceflow.core.spi import Split
from onceflow.sources.postgres.position import SlotPosition
from onceflow.sources.postgres.slot import drop_publication
from onceflow.sources.postgres.slot_progress import SlotFacts, read_slot

PREFIX = "onceflow_"
"""The beginning of the names of slots and publications that the user has not named."""
_READER = re.compile(r"onceflow (?P<job>\S+)/\d+/\d+ (?P<uid>.*)", re.DOTALL)
# A name stands for a slot of onceflow; so does a reader that is connected now.
_SLOTS = """
    SELECT s.slot_name::text, coalesce(a.application_name, '')
    FROM pg_catalog.pg_replication_slots AS s
    LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = s.active_pid
    WHERE s.plugin = 'pgoutput' AND s.database = current_database()
      AND (pg_catalog.starts_with(s.slot_name, {prefix})
           OR pg_catalog.starts_with(a.application_name, 'onceflow ')
           OR s.slot_name IN ({names}))
    ORDER BY 1
"""
_PUBLICATIONS = "SELECT pubname::text FROM pg_catalog.pg_publication"
_IN_USE = "55006"


@dataclass(frozen=True, slots=True)
class SlotOwner:
    """The source to which a slot belongs."""

    job: str
    uid: str


@dataclass(frozen=True, slots=True)
class LeftSlot:
    """A slot of onceflow, and the publication of the same name."""

    facts: SlotFacts
    owner: SlotOwner | None
    """None if no stored job and no connected reader names the slot."""
    is_stored: bool
    """True if a job in the given checkpoint storage continues from the slot."""
    reader: str
    """The name of the connected reader; empty if there is none."""
    publication: str | None
    """The publication that was created with the slot, if it exists."""

    @property
    def lag_bytes(self) -> int | None:
        """The number of bytes of WAL after the position up to which the slot was read."""
        confirmed = self.facts.confirmed
        return None if confirmed is None else max(0, self.facts.wal_end - confirmed)


def owners_by_slot(job: str, splits: Collection[tuple[str, Split]]) -> dict[str, SlotOwner]:
    """Return the source of each slot in the (uid, split) pairs of a stored job."""
    owners: dict[str, SlotOwner] = {}
    for uid, split in splits:
        try:
            position = SlotPosition.from_split(split)
        except StateIncompatible:  # the split of another kind of source
            continue
        owners[position.slot] = SlotOwner(job, uid)
    return owners


def list_slots(session: PostgresSession, stored: dict[str, SlotOwner]) -> Sequence[LeftSlot]:
    """Return the slots of onceflow in the session's database; `stored` has stored jobs' slots."""
    names = ", ".join(map(literal, stored)) or "NULL"
    publications = {str(name) for (name,) in session.query(_PUBLICATIONS)}
    slots: list[LeftSlot] = []
    for name, reader in session.query(_SLOTS.format(prefix=literal(PREFIX), names=names)):
        facts = read_slot(session, str(name))
        if facts is None:  # it was dropped in between
            continue
        connected = _READER.fullmatch(str(reader))
        owner = stored.get(facts.name)
        if owner is None and connected is not None:
            owner = SlotOwner(connected["job"], connected["uid"])
        own = facts.name in publications and facts.name.startswith(PREFIX)
        publication = facts.name if own else None
        slots.append(LeftSlot(facts, owner, facts.name in stored, str(reader), publication))
    return slots


def drop_slot(session: PostgresSession, slot: LeftSlot) -> None:
    """Drop `slot` and its publication. Do nothing if they are gone.

    Raises:
        OffsetOutOfRange: A reader uses the slot.
        ConfigError: The user may not drop the slot or the publication.
        SqlError: The server does not answer.
    """
    name = slot.facts.name
    # The query finds no slot, instead of an error, if another process has dropped it.
    try:
        session.query(
            "SELECT pg_catalog.pg_drop_replication_slot(slot_name)::text"
            f" FROM pg_catalog.pg_replication_slots WHERE slot_name = {literal(name)}"
        )
    except StatementRefused as error:
        if error.code == _IN_USE:
            raise OffsetOutOfRange(
                f"slot {name} is in use by {slot.reader or 'a reader'}: stop the job first"
                " (onceflow stop), or wait until the server has noticed that its reader is gone"
                " (wal_sender_timeout)"
            ) from error
        raise ConfigError(f"slot {name} cannot be dropped: {error}") from error
    if slot.publication is not None:
        drop_publication(session, slot.publication)
