"""The keyed state of a snapshot, read without a store and without the program that wrote it.

A piece is the unit of one reader: one part of a canonical snapshot, a whole snapshot with layers of
changes, or one RocksDB. A RocksDB is first copied to local disk, into a directory that is deleted
after the last row.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onceflow.core.errors import StateIncompatible
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.state.api.context import StateContext, StateHandle, StateReader
from onceflow.core.state.snapshots import canonical
from onceflow.core.state.snapshots.state_meta import StateMeta


@dataclass(frozen=True, slots=True)
class StatePiece:
    """A part of the keyed state of one operator's subtask. Can be pickled."""

    uid: str
    subtask: int
    max_parallelism: int
    handles: tuple[StateHandle, ...]
    """The handles of one canonical part; or of the layers of a snapshot, the last one first, and
    its base; or of a manifest and all files of its database."""

    def within(self, group: int) -> bool:
        """Return True if rows of key group `group` may be in the piece."""
        handle = self.handles[0]
        return handle.key_group_first <= group <= handle.key_group_last

    def metas(self, reader: StateReader) -> list[StateMeta]:
        """Return the states of the piece. Reads only metadata if possible.

        Raises:
            StateIncompatible: A newer onceflow or another backend wrote it.
            CheckpointCorrupt: A file is damaged or missing.
        """
        context = self._context(range(self.max_parallelism))
        if canonical.is_canonical(self.handles[0]):
            return canonical.read_metas(reader, self.handles[0], context)
        from onceflow.core.state.rocksdb.snapshots import is_manifest, read_manifest

        manifest = next(handle for handle in self.handles if is_manifest(handle))
        return read_manifest(reader, manifest, context).metas()

    def rows(
        self, name: str, reader: StateReader, key_groups: range | None = None
    ) -> Iterator[canonical.StateRows]:
        """Yield the rows of state `name`, of all key groups or only those in `key_groups`.

        Raises:
            StateIncompatible: A newer onceflow or another backend wrote it.
            CheckpointCorrupt: A file is damaged or missing; names it.
        """
        context = self._context(key_groups or range(self.max_parallelism))
        if canonical.is_canonical(self.handles[0]):
            for meta, rows in canonical.read_canonical(reader, self.handles, context):
                if meta.name == name and len(rows):
                    yield rows
            return
        yield from self._rows_of_database(name, reader, context)

    def _rows_of_database(
        self, name: str, reader: StateReader, context: StateContext
    ) -> Iterator[canonical.StateRows]:
        from onceflow.core.state.rocksdb.snapshots import (
            download_copy,
            is_manifest,
            read_manifest,
            read_rows_of_copy,
        )

        by_name = {handle.name: handle for handle in self.handles}
        manifest = read_manifest(reader, next(filter(is_manifest, self.handles)), context)
        stored, asked = manifest.key_groups, context.key_groups
        groups = range(max(stored.start, asked.start), min(stored.stop, asked.stop))
        with tempfile.TemporaryDirectory(prefix="onceflow-state-") as scratch:
            copy = Path(scratch) / "copy"
            download_copy(reader, manifest, by_name, copy)
            yield from read_rows_of_copy(copy, name, groups)

    def _context(self, key_groups: range) -> StateContext:
        return StateContext(self.uid, self.subtask, key_groups, self.max_parallelism, Path())


def list_pieces(
    snapshots: Iterable[tuple[int, OperatorSnapshot]], max_parallelism: int
) -> list[StatePiece]:
    """Return the pieces of an operator's keyed state; `snapshots` are by subtask.

    Raises:
        StateIncompatible: Another backend wrote the state in its native form.
    """
    pieces: list[StatePiece] = []
    for subtask, snapshot in snapshots:
        native = tuple(handle for handle in snapshot.keyed if not canonical.is_canonical(handle))
        parts: list[tuple[StateHandle, ...]] = [
            (h,) for h in snapshot.keyed if canonical.is_canonical(h)
        ]
        if any(map(canonical.is_layer, snapshot.keyed)):
            # The layers determine the valid rows of the base, so one reader must read all of them.
            parts = [tuple(canonical.sort_parts(filter(canonical.is_canonical, snapshot.keyed)))]
        if native:
            _check_native(snapshot.uid, native)
            parts.append(native)
        pieces += [StatePiece(snapshot.uid, subtask, max_parallelism, part) for part in parts]
    return pieces


def _check_native(uid: str, handles: Sequence[StateHandle]) -> None:
    from onceflow.core.state.rocksdb.snapshots import is_manifest

    if not any(map(is_manifest, handles)):
        raise StateIncompatible(
            f"the state of {uid!r} is in the native form of a state backend ({handles[0].name}),"
            " which cannot be read here: take a canonical savepoint, and read that"
        )


def read_metas_by_name(pieces: Iterable[StatePiece], reader: StateReader) -> dict[str, StateMeta]:
    """Return the states of an operator, by name.

    Raises:
        StateIncompatible: Two subtasks hold a name with different kinds or types.
        CheckpointCorrupt: A file is damaged or missing; names it.
    """
    states: dict[str, StateMeta] = {}
    # Each piece of a subtask names all its states, so one piece of each subtask is enough.
    for piece in {piece.subtask: piece for piece in reversed(list(pieces))}.values():
        for meta in piece.metas(reader):
            states.setdefault(meta.name, meta).check_equal(meta, f"{piece.uid}[{piece.subtask}]")
    return dict(sorted(states.items()))
