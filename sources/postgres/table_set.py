"""The rule by which a job reads more or fewer tables than its checkpoint. Pure: no I/O.

A table that the checkpoint does not contain is copied while the changes of the other tables are
read. During this copy the slot does not move, and each followed table has a position of its own, at
or after that of the slot. After the copy, the reader reads from the slot's position again. For each
table, it returns only the changes after the table's own position.

docs/decisions/0045-first-copy-by-snapshots-of-chunks.md has the proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onceflow.core.errors import OffsetOutOfRange
from onceflow.sources.postgres.first_copy import CopiedChunks
from onceflow.sources.postgres.position import SlotPosition, TablePosition
from onceflow.sources.postgres.table import SourceTable


@dataclass(frozen=True, slots=True)
class AdaptedPosition:
    """A position with the tables that are read now."""

    position: SlotPosition
    kept: tuple[SourceTable, ...]
    added: tuple[SourceTable, ...]
    removed: tuple[TablePosition, ...]

    def set_versions(self, versions: Mapping[int, str]) -> SlotPosition:
        """Return the position with the publication's `versions` of the added tables, by OID."""
        tables = (
            replace(table, published=versions.get(table.oid, table.published))
            for table in self.position.tables
        )
        return replace(self.position, tables=tuple(tables))


def adapt_position(
    position: SlotPosition, tables: Sequence[SourceTable], *, only_same: bool
) -> AdaptedPosition:
    """Return `position` with exactly `tables`. With `only_same`, no table may be added or removed.

    Raises:
        OffsetOutOfRange: A table was replaced, or `only_same` is set and the tables differ.
    """
    by_oid = {table.oid: table for table in tables}
    by_name = {table.name: table for table in tables}
    known = {table.oid for table in position.tables}
    for table in position.tables:
        namesake = by_name.get(table.name)
        if table.oid not in by_oid and (only_same or namesake is not None):
            now = namesake or tables[0]
            raise OffsetOutOfRange(
                f"table {now.name} was dropped and created again (oid {table.oid}, now {now.oid}),"
                f" or the checkpoint is about table {table.name}. If it is about that one, correct"
                f" table=. If not: {position.copy_anew}"
            )
    added = tuple(table for table in tables if table.oid not in known)
    if added and only_same:
        raise OffsetOutOfRange(
            f"the checkpoint has no position in table {added[0].name}: name its tables with tables="
        )
    kept = tuple(table for table in position.tables if table.oid in by_oid)
    adapted = replace(position, tables=kept)
    if added:
        if not _is_first_copy(adapted):
            adapted = _detach(adapted)
        new = (TablePosition(table.name, table.oid, CopiedChunks()) for table in added)
        adapted = replace(adapted, tables=(*adapted.tables, *new))
    return AdaptedPosition(
        adapted,
        tuple(by_oid[table.oid] for table in kept),
        added,
        tuple(table for table in position.tables if table.oid not in by_oid),
    )


def _is_first_copy(position: SlotPosition) -> bool:
    """Return True if the first tables are still copied, so that none is followed yet."""
    return position.is_copying and all(table.ahead is None for table in position.tables)


def _detach(position: SlotPosition) -> SlotPosition:
    """Return `position` with a position of its own for each table that is followed."""
    tables = tuple(
        table
        if table.is_copying or table.ahead is not None
        else replace(table, ahead=position.start)
        for table in position.tables
    )
    return replace(position, tables=tables, cut=None)
