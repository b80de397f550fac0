"""The parts that both backends' stores share: open states, files of older snapshots, expired rows.

`protocol/checkpoints/snapshots` has the rules for files that several snapshots share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from onceflow.core.decoding import msgpack_decoder
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.api.context import StateContext, StateHandle
from onceflow.core.state.snapshots.canonical import StateRows
from onceflow.core.state.snapshots.state_meta import StateKind, StateMeta
from onceflow.core.state.types.serializers import ExpiringSerializer, Serializer


class OpenStates:
    """The states of a store by name. A name means one state for the life of the store."""

    def __init__(self, context: StateContext) -> None:
        self._label = str(context)
        self._claimed: dict[str, tuple[StateMeta, Any]] = {}
        self._complete = False

    def find(self, asked: StateMeta) -> Any | None:
        """Return the state object of this name, or None if it was not asked for before.

        Raises:
            ConfigError: It was asked for with another kind or type, or it is asked for too late.
        """
        if asked.name not in self._claimed:
            if self._complete:
                raise ConfigError(
                    f"state {asked.name!r} of {self._label} is declared while records are"
                    " processed. Declare every state in open(), where it is restored"
                )
            return None
        meta, state = self._claimed[asked.name]
        if meta != asked:
            raise ConfigError(
                f"state {asked.name!r} of {self._label} is used as {meta.kind} {meta.signature}"
                f" and as {asked.kind} {asked.signature}; give each state its own name"
            )
        return state

    def complete(self) -> None:
        """Refuse new names from here on."""
        self._complete = True

    def add(self, meta: StateMeta, state: Any) -> None:
        """Register `state` under its name."""
        self._claimed[meta.name] = (meta, state)


FileHandles: TypeAlias = dict[str, StateHandle]
"""The backend's own name of a file, to the handle of its copy in checkpoint storage."""


class KnownFiles:
    """The files that storage will still hold when a new snapshot is decided.

    These are the files of the last completed checkpoint, because the files of an aborted one are
    deleted. If earlier snapshots are undecided, only files that these reference, too, are included:
    if one of them completes and the last completed checkpoint is deleted, the files are still
    referenced. Used by the owner's thread, except for `note_upload`.
    """

    def __init__(self, restored: FileHandles) -> None:
        self._completed = restored
        self.base: CheckpointId | None = None
        """The last completed checkpoint whose files are known, or None if there was none since the
        restore."""
        self._undecided: dict[CheckpointId, FileHandles] = {}
        self._uploaded: dict[CheckpointId, FileHandles] = {}

    def begin(self, checkpoint: CheckpointId) -> FileHandles:
        """Return the files that the snapshot of `checkpoint` may reference without an upload."""
        files = {
            name: handle
            for name, handle in self._completed.items()
            if all(known.get(name) == handle for known in self._undecided.values())
        }
        self._undecided[checkpoint] = files
        return files

    def begin_anew(self, checkpoint: CheckpointId) -> None:
        """Record that the snapshot of `checkpoint` references no file of another one."""
        self._undecided[checkpoint] = {}

    def is_complete(self, files: FileHandles) -> bool:
        """Return True if `files` are all files of the last completed checkpoint."""
        return len(files) == len(self._completed)

    def note_upload(self, checkpoint: CheckpointId, files: FileHandles) -> None:
        """Record all files that the snapshot of `checkpoint` references. Any thread."""
        self._uploaded[checkpoint] = files

    def complete(self, checkpoint: CheckpointId) -> None:
        """Build on `checkpoint` from now on. All earlier checkpoints are decided, too."""
        files = self._uploaded.get(checkpoint)
        if files is None:
            return
        self._completed = files
        self.base = checkpoint
        # An upload may have ended after a newer checkpoint had completed. `list` first: an
        # uploading thread may add to `_uploaded` meanwhile, and building a set from a growing dict
        # raises.
        for decided in {*self._undecided, *list(self._uploaded)}:
            if decided <= checkpoint:
                self.abort(decided)

    def abort(self, checkpoint: CheckpointId) -> None:
        """Forget the aborted checkpoint, so that no later snapshot references its files."""
        self._undecided.pop(checkpoint, None)
        self._uploaded.pop(checkpoint, None)


_decode_list = msgpack_decoder(list[bytes]).decode
_encode_list = msgspec.msgpack.Encoder().encode


def filter_expired(
    chunks: Iterable[StateRows], kind: StateKind, serializer: Serializer[Any]
) -> Iterable[StateRows]:
    """Return the rows for a full snapshot: all, or only those that have not expired."""
    if isinstance(serializer, ExpiringSerializer) and serializer.cleans_snapshots:
        return _AliveRows(chunks, kind, serializer)
    return chunks


class _AliveRows:
    """The rows that have not expired at the time at which they are written."""

    def __init__(
        self, chunks: Iterable[StateRows], kind: StateKind, serializer: ExpiringSerializer
    ) -> None:
        self._chunks = chunks
        self._kind = kind
        self._serializer = serializer

    def __iter__(self) -> Iterator[StateRows]:
        for rows in self._chunks:
            values = [self._alive(value) for value in rows.values.to_pylist()]
            alive = np.array([value is not None for value in values], np.bool_)
            mask = pa.array(alive)
            kept = pa.array([value for value in values if value is not None], pa.large_binary())
            yield StateRows(rows.groups[alive], rows.keys.filter(mask), kept)

    def _alive(self, value: bytes) -> bytes | None:
        """Return the part of a row's value that has not expired, or None if all of it has."""
        expired = self._serializer.are_bytes_expired
        if self._kind != "list":
            return None if expired(value) else value
        elements = _decode_list(value)
        alive = [element for element in elements if not expired(element)]
        if len(alive) == len(elements):
            return value
        return _encode_list(alive) if alive else None


def stamp_value(value: bytes, kind: StateKind, serializer: Serializer[Any]) -> bytes:
    """Return a value that was stored without a time, with now as the time of its last use."""
    if not isinstance(serializer, ExpiringSerializer):
        return value
    if kind != "list":
        return serializer.stamp(value)
    return _encode_list([serializer.stamp(element) for element in _decode_list(value)])
