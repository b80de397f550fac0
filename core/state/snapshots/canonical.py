"""The canonical form of keyed state, which every backend can write and restore.

One snapshot of one subtask is one or more *parts*, each a complete Arrow IPC stream. Its schema
metadata holds, under `onceflow.state`, JSON: format, max parallelism and each state's name, kind
and signature. The checksum of this JSON is under `onceflow.state.xxh3`. The columns of a part:
`state` (index into that list), `key_group`, `key` and `value`. The content of `key` and `value`
depends on the kind:

    value, list     key = encoded key;  value = the value, or the MessagePack array of the elements
    map             key = 4-byte big-endian length and encoded key, then the encoded map key
    accumulators    key = encoded key columns;  value = the columns' totals, then their flags

A state without rows is in the metadata, too, so that its type is checked.

A checkpoint of the heap may be *layers* of changes on a *base*, which consists of parts as above. A
layer's parts are named `changes-<number of its checkpoint>-…`. Their metadata also has `whole`: the
indices of the states of which the layer holds all rows. Of the other states it holds the rows of
the keys that have changed since the layer below. These replace all older rows of their keys. A row
without a value only deletes older rows; for a map, its key is the part of the row key before the
map key. All parts of one subtask's snapshot have the same key groups in their handles, which no
other subtask's parts have.

A restore drops no state silently. It refuses, by name, a state that the operator does not ask for,
or asks for with another type. If the user allows it, exactly this state is dropped and logged.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from onceflow.core.errors import StateCorrupt, StateError, StateIncompatible
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.api.context import StateContext, StateHandle, StateReader, StateWriter
from onceflow.core.state.api.descriptors import ALONE, USED
from onceflow.core.state.snapshots.state_meta import StateKind, StateMeta, aggregates_of
from onceflow.core.state.types.serializers import TTL_PREFIX
from onceflow.core.state.types.type_names import explain_misfit, reads_as

Groups: TypeAlias = npt.NDArray[np.uint16]

FORMAT = 1
PART_PREFIX = "canonical-"
CHANGES_PREFIX = "changes-"
"""The prefix of the names of a layer's parts. The layer's number follows, so that names sort by
layer."""
BATCH_ROWS = 8192
"""The number of rows below which chunks are joined, because each batch costs some time and bytes.
"""
PART_BYTES = 32 << 20
"""The size above which a part is closed; bounds the bytes that one look-up of a key reads."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""The end of an Arrow IPC stream: the mark of a message, and 0 as its length."""
_PARTNERS = "the record of which kept rows had no partner"
"""The description of a join's column `ALONE` for the user."""
_METADATA_KEY = b"onceflow.state"
_CHECKSUM_KEY = b"onceflow.state.xxh3"
"""The key of the checksum of the metadata, which is also read from unverified heads of files."""
_FIELDS = [
    pa.field("state", pa.uint16()),
    pa.field("key_group", pa.uint16()),
    pa.field("key", pa.large_binary()),
    pa.field("value", pa.large_binary()),
]


@dataclass(frozen=True, slots=True)
class StateRows:
    """Some rows of one state."""

    groups: Groups
    keys: pa.Array
    values: pa.Array

    def __len__(self) -> int:
        return len(self.groups)

    def within(self, key_groups: range) -> StateRows:
        """Return the rows of these key groups."""
        return self.filter((self.groups >= key_groups.start) & (self.groups < key_groups.stop))

    def filter(self, chosen: npt.NDArray[np.bool_]) -> StateRows:
        """Return the rows for which `chosen` is True."""
        if bool(chosen.all()):
            return self
        mask = pa.array(chosen)
        return StateRows(self.groups[chosen], self.keys.filter(mask), self.values.filter(mask))


StateContent: TypeAlias = tuple[StateMeta, Iterable[StateRows]]


class _Part:
    """The batches of one part, generated lazily. The part ends once it is large enough."""

    def __init__(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        self._schema = schema
        self._batches = batches
        self.is_last = False
        """Set once there are no further batches."""

    def __iter__(self) -> Iterator[pa.Buffer]:
        """Yield the bytes of an Arrow IPC stream, a batch at a time."""
        yield self._schema.serialize()
        size_bytes = 0
        # Parts of bounded size can be restored by several slots at once, each reading only those of
        # its key groups.
        while size_bytes < PART_BYTES:
            batch = next(self._batches, None)
            if batch is None:
                self.is_last = True
                break
            message = batch.serialize()
            size_bytes += message.size
            yield message
        yield pa.py_buffer(_END_OF_STREAM)


def write_canonical(
    writer: StateWriter, context: StateContext, states: Sequence[StateContent]
) -> tuple[StateHandle, ...]:
    """Write `states` as parts and return their handles: at least one, even without any row.

    Only one batch is in memory at a time.
    """
    return _write_parts(writer, context, states, PART_PREFIX, {}, shared=False)


def write_base(
    writer: StateWriter, context: StateContext, states: Sequence[StateContent], unique: str
) -> tuple[StateHandle, ...]:
    """Write `states` like `write_canonical`, in files that later snapshots may reference.

    `unique` makes their names differ from those of any other snapshot.
    """
    return _write_parts(writer, context, states, f"{PART_PREFIX}{unique}-", {}, shared=True)


def write_layer(
    writer: StateWriter,
    context: StateContext,
    states: Sequence[StateContent],
    whole: Collection[str],
    layer: CheckpointId,
    unique: str,
) -> tuple[StateHandle, ...]:
    """Write the changes of `states` as parts, and all rows of those in `whole`.

    Return the handles.
    """
    about = {
        "layer": layer,
        "whole": [index for index, (meta, _) in enumerate(states) if meta.name in whole],
    }
    # Twelve digits, so that names sort like the checkpoints.
    prefix = f"{CHANGES_PREFIX}{layer:012d}-{unique}-"
    return _write_parts(writer, context, states, prefix, about, shared=True)


def _write_parts(
    writer: StateWriter,
    context: StateContext,
    states: Sequence[StateContent],
    prefix: str,
    more: dict[str, Any],
    *,
    shared: bool,
) -> tuple[StateHandle, ...]:
    about = {
        "format": FORMAT,
        "uid": context.uid,
        "max_parallelism": context.max_parallelism,
        "states": [[meta.name, meta.kind, meta.signature] for meta, _ in states],
        **more,
    }
    described = json.dumps(about).encode()
    checksum = xxhash.xxh3_64_hexdigest(described).encode()
    schema = pa.schema(_FIELDS, metadata={_METADATA_KEY: described, _CHECKSUM_KEY: checksum})
    batches = _merge_batches(states, schema)
    handles: list[StateHandle] = []
    is_last = False
    while not is_last:
        # Numbered with leading zeros, because parts are sorted by name.
        name = f"{prefix}{len(handles):05d}.arrow"
        part = _Part(schema, batches)
        groups = context.key_groups
        handles.append(writer.write_chunks(name, part, shared=shared, key_groups=groups))
        is_last = part.is_last
    return tuple(handles)


def _merge_batches(states: Sequence[StateContent], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for index, (_, chunks) in enumerate(states):
        for rows in merge_chunks(chunks):
            if len(rows):
                columns = [
                    pa.array(np.full(len(rows), index, np.uint16)),
                    pa.array(rows.groups),
                    _to_large(rows.keys),
                    _to_large(rows.values),
                ]
                yield pa.record_batch(columns, schema=schema)


def _to_large(array: pa.Array) -> pa.Array:
    # A cast takes time even if the type is the same.
    return array if array.type == pa.large_binary() else array.cast(pa.large_binary())


def merge_chunks(chunks: Iterable[StateRows]) -> Iterator[StateRows]:
    """Yield the same rows in larger chunks."""
    waiting: list[StateRows] = []
    count = 0
    for rows in chunks:
        waiting.append(rows)
        count += len(rows)
        # A batch costs some hundred bytes, and a backend's chunks may have only a few rows each.
        if count >= BATCH_ROWS:
            yield _concat(waiting)
            waiting, count = [], 0
    if count:
        yield _concat(waiting)


def _concat(chunks: Sequence[StateRows]) -> StateRows:
    if len(chunks) == 1:
        return chunks[0]
    return StateRows(
        np.concatenate([rows.groups for rows in chunks]),
        pa.concat_arrays([rows.keys for rows in chunks]),
        pa.concat_arrays([rows.values for rows in chunks]),
    )


def is_canonical(handle: StateHandle) -> bool:
    """Return True if `handle` is a part of a canonical snapshot, or of a layer of changes."""
    return handle.name.startswith((PART_PREFIX, CHANGES_PREFIX))


def is_layer(handle: StateHandle) -> bool:
    """Return True if `handle` is a part of a layer of changes."""
    return handle.name.startswith(CHANGES_PREFIX)


def read_canonical(
    reader: StateReader, handles: Iterable[StateHandle], context: StateContext
) -> Iterator[tuple[StateMeta, StateRows]]:
    """Yield the rows of the context's key groups, for each state at least once, even without rows.

    Rows that a later layer has changed or deleted are left out.

    Raises:
        StateIncompatible: Written with another max parallelism, or by a newer onceflow.
        StateCorrupt: The bytes pass their checksum, but are no part of a canonical snapshot.
    """
    snapshots: dict[tuple[int, int], list[StateHandle]] = {}
    for handle in handles:
        groups = handle.key_group_first, handle.key_group_last
        snapshots.setdefault(groups, []).append(handle)
    for parts in snapshots.values():
        layers = _Layers()
        # Without layers, all parts belong to the base, and each row counts.
        for name, of_layer in groupby(sort_parts(parts), _make_layer_key):
            layers.begin_layer(is_base=not name)
            for handle in of_layer:
                yield from _read_part(reader, handle, context, layers)


def _read_part(
    reader: StateReader, handle: StateHandle, context: StateContext, layers: _Layers
) -> Iterator[tuple[StateMeta, StateRows]]:
    try:
        with pa.ipc.open_stream(reader.read(handle)) as stream:
            metas = _parse_metas(stream.schema, handle, context)
            layers.begin_part(metas, (_read_metadata(stream.schema) or {}).get("whole", ()))
            for meta in metas:
                if layers.takes(meta):
                    # Yield a state without rows, too: the caller checks its type.
                    yield meta, _no_rows()
            for batch in stream:
                for meta, rows in _split_rows(batch, metas, context.key_groups):
                    if layers.takes(meta) and len(counted := layers.pick(meta, rows)):
                        yield meta, counted
    except pa.ArrowInvalid as error:
        raise _no_state_file(handle, context, error) from error


class _Layers:
    """The states and keys that later layers of one snapshot replace.

    The last layer is read first.
    """

    def __init__(self) -> None:
        self._is_base = True
        self._states: frozenset[str] | None = None
        """The states of the last layer; other states were dropped since. None if there is no layer:
        then all states count, because parts from tables may have different ones."""
        self._complete: set[str] = set()
        """The states of which all rows have been read."""
        self._changed: dict[str, set[bytes]] = {}
        """The keys whose rows were read, or are deleted, by state."""
        self._whole_here: set[str] = set()
        self._changed_here: dict[str, set[bytes]] = {}

    def begin_layer(self, *, is_base: bool) -> None:
        """Begin the next lower layer. Rows that were read so far replace its rows."""
        self._is_base = is_base
        # Only now, because the parts of one layer do not replace each other's rows.
        self._complete |= self._whole_here
        self._whole_here = set()
        for name, keys in self._changed_here.items():
            self._changed.setdefault(name, set()).update(keys)
        self._changed_here = {}

    def begin_part(self, metas: Sequence[StateMeta], whole: Iterable[int]) -> None:
        """Record the states in the metadata of a part of the layer."""
        if self._states is None and not self._is_base:
            self._states = frozenset(meta.name for meta in metas)
        self._whole_here.update(metas[index].name for index in whole)

    def takes(self, meta: StateMeta) -> bool:
        """Return True if rows of this state in the current layer are valid."""
        dropped = self._states is not None and meta.name not in self._states
        return not dropped and meta.name not in self._complete

    def pick(self, meta: StateMeta, rows: StateRows) -> StateRows:
        """Return the rows that no later layer has replaced, without rows that only delete."""
        changed = self._changed.get(meta.name, frozenset[bytes]())
        if self._is_base and not changed:
            return rows
        # A layer holds the whole entry of a map, so older items of the entry are deleted.
        owners = _owners(rows.keys.to_pylist(), meta.kind)
        if not self._is_base:
            self._changed_here.setdefault(meta.name, set()).update(owners)
        counted = np.asarray(rows.values.is_valid().to_numpy(zero_copy_only=False), np.bool_)
        return rows.filter(
            counted & np.fromiter((owner not in changed for owner in owners), np.bool_, len(owners))
        )


def sort_parts(parts: Iterable[StateHandle]) -> list[StateHandle]:
    """Return the parts of one snapshot, those of the last layer first, and the base's last."""
    return sorted(parts, key=_make_layer_key, reverse=True)


def _make_layer_key(handle: StateHandle) -> str:
    """Return a text by which the layers of one snapshot sort; empty for its base."""
    return handle.name[: len(CHANGES_PREFIX) + 12] if is_layer(handle) else ""


def _owners(keys: Sequence[bytes], kind: StateKind) -> Sequence[bytes]:
    """Return the part of each row's key that names the entry, which a layer replaces whole."""
    if kind != "map":
        return keys
    # The format of `add_length`: the length of the key, then the key. The item's own key follows.
    return [key[: 4 + int.from_bytes(key[:4], "big")] for key in keys]


def read_metas(reader: StateReader, handle: StateHandle, context: StateContext) -> list[StateMeta]:
    """Return the states in the metadata of a part.

    Raises:
        StateIncompatible: Written with another max parallelism, or by a newer onceflow.
        StateCorrupt: The bytes are no part of a canonical snapshot.
        CheckpointCorrupt: The file is gone, or its bytes are not those that were written.
    """
    # The head nearly always has the whole schema, so the part need not be read. If the head is
    # damaged, reading the part raises CheckpointCorrupt.
    for read in (reader.head, reader.read):
        data = read(handle)
        try:
            with pa.ipc.open_stream(data) as stream:
                return _parse_metas(stream.schema, handle, context)
        except (pa.ArrowException, OSError, StateCorrupt) as error:
            failure = error
    raise _no_state_file(handle, context, failure) from failure


def _no_state_file(handle: StateHandle, context: StateContext, error: Exception) -> StateCorrupt:
    return StateCorrupt(
        f"{handle.name} of {context} ({handle.path or 'inline'}) cannot be read as a state file:"
        f" {error}; restore an older checkpoint"
    )


def _parse_metas(schema: pa.Schema, handle: StateHandle, context: StateContext) -> list[StateMeta]:
    about = _read_metadata(schema)
    if about is None:
        raise StateCorrupt(f"{handle.name} of {context} has no metadata of its states")
    check_format(about["format"], FORMAT, handle.name, context)
    check_same_max_parallelism(about["max_parallelism"], context)
    return [StateMeta(*state) for state in about["states"]]


def _read_metadata(schema: pa.Schema) -> dict[str, Any] | None:
    """Return the description of the states, or None if it is missing or damaged."""
    metadata = schema.metadata or {}
    described = metadata.get(_METADATA_KEY)
    if described is None:
        return None
    checksum = xxhash.xxh3_64_hexdigest(described).encode()
    # Files of earlier versions have no checksum.
    if metadata.get(_CHECKSUM_KEY, checksum) != checksum:
        return None
    about: dict[str, Any] = json.loads(described)
    return about


def check_format(stored: int, known: int, name: str, context: StateContext) -> None:
    """Raise StateIncompatible unless this version reads files of format `stored`."""
    if stored > known:
        raise StateIncompatible(
            f"{name} of {context} has format {stored}, but this version of onceflow reads"
            f" format {known}: upgrade onceflow"
        )
    if stored < known:
        raise StateIncompatible(
            f"{name} of {context} has format {stored}, but this version of onceflow reads format"
            f" {known}: take a canonical savepoint with the version that wrote it, and start from"
            " that savepoint"
        )


def check_same_max_parallelism(stored: int, context: StateContext) -> None:
    """Raise StateIncompatible unless state written with `stored` key groups can be restored.

    With another number of key groups, a key would belong to another group.
    """
    if stored != context.max_parallelism:
        raise StateIncompatible(
            f"state of {context} was written with max parallelism {stored} but is restored with"
            f" {context.max_parallelism}. The max parallelism of a job cannot change: set it back"
            f" to {stored}"
        )


def _split_rows(
    batch: pa.RecordBatch, metas: Sequence[StateMeta], key_groups: range
) -> Iterator[tuple[StateMeta, StateRows]]:
    states, groups, keys, values = batch.columns
    if not len(states):
        return
    # A batch holds rows of only one state: `_merge_batches` creates one from each chunk.
    index = states[0].as_py()
    if index >= len(metas):
        raise StateError(
            f"a row of a snapshot refers to state {index}, but the snapshot has {len(metas)} states"
        )
    rows = StateRows(groups.to_numpy(), keys, values).within(key_groups)
    if len(rows):
        yield metas[index], rows


def _no_rows() -> StateRows:
    none = pa.array([], pa.large_binary())
    return StateRows(np.zeros(0, np.uint16), none, none)


def _describe_deletion(gone: Sequence[str]) -> str:
    """Return a text that tells a user how to drop state, and what that deletes."""
    deleted = ", ".join(gone) if gone else "nothing"
    return (
        "start with Pipeline(…, allow_non_restored_state=True), which deletes"
        f" {deleted} and keeps offsets, sink ids and all other state"
    )


class RestoredStates:
    """The states of one store's snapshot. Used by the store's thread."""

    def __init__(self, context: StateContext, metas: Iterable[StateMeta] = ()) -> None:
        self._label = str(context)
        self._allowed = context.allow_non_restored_state
        self._unclaimed = {meta.name: meta for meta in metas}
        self._asked: list[str] = []
        self.dropped: list[str] = []
        """The states and aggregates that were dropped, for people."""

    def add(self, meta: StateMeta) -> None:
        """Add a state of one more part of the snapshot.

        Raises:
            StateIncompatible: Another part holds it with another kind or type.
        """
        self._unclaimed.setdefault(meta.name, meta).check_equal(meta, self._label)

    def list_unclaimed(self) -> tuple[StateMeta, ...]:
        """Return the states that the operator has not asked for yet."""
        return tuple(self._unclaimed.values())

    def claim(self, asked: StateMeta) -> StateMeta | None:
        """Return the snapshot's description of the state `asked`, or None if it lacks the state.

        The description may differ from `asked`: it may have more aggregates, no time to live, or a
        narrower type.

        Raises:
            StateIncompatible: The state cannot be read as `asked`, and may not be dropped.
        """
        stored = self._unclaimed.get(asked.name)
        if stored is not None and stored != asked and not _reads_as(stored, asked):
            return self._claim_part(stored, asked)
        self._note_claimed(asked)
        return stored

    def drop_unclaimed(self) -> tuple[StateMeta, ...]:
        """Drop the states that the opened operator did not ask for. Return them.

        Raises:
            StateIncompatible: They may not be dropped.
        """
        unclaimed = self.list_unclaimed()
        if unclaimed and not self._allowed:
            names = ", ".join(f"{meta.name!r} ({meta.kind} {meta.signature})" for meta in unclaimed)
            gone = [f"state {meta.name!r}" for meta in unclaimed]
            asked = ", ".join(map(repr, sorted(self._asked))) or "none"
            raise StateIncompatible(
                f"the checkpoint holds state {names} of {self._label}, but the operator does not"
                f" use it in open() (it uses {asked}). A renamed state would start empty. Restore"
                f" the old name or function; or {_describe_deletion(gone)}"
            )
        self._unclaimed.clear()
        # Without the subtask: each subtask drops the same states, and people read it once.
        uid = self._label.partition("[")[0]
        self.dropped += [f"state {meta.name!r} of {uid}" for meta in unclaimed]
        return unclaimed

    def _note_claimed(self, asked: StateMeta) -> None:
        self._asked.append(asked.name)
        self._unclaimed.pop(asked.name, None)

    def _claim_part(self, stored: StateMeta, asked: StateMeta) -> StateMeta | None:
        """Claim the aggregates that both have. Drop all others if that is allowed."""
        kept, gone, new = _compare(stored, asked)
        if gone == [_PARTNERS] and not new and not self._allowed:
            side = asked.name.removeprefix("onceflow.").partition("-")[0]
            raise StateIncompatible(
                f"the {side} side of join {self._label} was outer, but no longer is. The job"
                " would forget which of the kept records had no partner, so the join could not"
                f" become outer again. Join with the former how=; or {_describe_deletion(gone)},"
                " including the kept records"
            )
        if (gone or new) and not self._allowed:
            started = f" {', '.join(new)} would contain only records from now on." if new else ""
            if begins_to_expire(asked, stored) or _ceases_to_expire(stored, asked):
                started += (
                    " Its time to live cannot be removed: expired entries that are still in the"
                    " checkpoint would return. Choose a longer time to live."
                )
            elif stored.kind == asked.kind != "accumulators":
                if why := explain_misfit(stored.signature, asked.signature):
                    started += f" {why[0].upper()}{why[1:]}."
                started += " A class that was only renamed is found by New.__qualname__ = 'Old'."
            raise StateIncompatible(
                f"state {asked.name!r} of {self._label} was written as {stored.kind}"
                f" {stored.signature}, but is now declared as {asked.kind}"
                f" {asked.signature}.{started} Declare it as before; or"
                f" {_describe_deletion(gone)}"
            )
        self._note_claimed(asked)
        self.dropped += [f"{name} of {self._label.partition('[')[0]}" for name in gone]
        return stored if kept else None


def _reads_as(stored: StateMeta, asked: StateMeta) -> bool:
    same_kind = stored.kind == asked.kind != "accumulators"
    return same_kind and reads_as(stored.signature, asked.signature)


def begins_to_expire(stored: StateMeta, asked: StateMeta) -> bool:
    """Return True if `asked` is `stored` with an added time to live."""
    expires_only_now = TTL_PREFIX in asked.signature and TTL_PREFIX not in stored.signature
    return expires_only_now and _reads_as(stored, asked)


def _ceases_to_expire(stored: StateMeta, asked: StateMeta) -> bool:
    """Return True if `stored` are aggregates with a time to live, and `asked` are some without."""
    both = stored.kind == asked.kind == "accumulators"
    return both and USED.name in aggregates_of(stored)[1].keys() - aggregates_of(asked)[1].keys()


def _describe_aggregate(name: str) -> str:
    return _PARTNERS if name == ALONE else f"aggregate {name!r}"


def _compare(stored: StateMeta, asked: StateMeta) -> tuple[list[str], list[str], list[str]]:
    """Return the aggregates of `stored` that are kept, those that are gone, and those that are new.

    A state that is no table of aggregates is kept as a whole or not at all.
    """
    if stored.kind == asked.kind == "accumulators":
        old_keys, old = aggregates_of(stored)
        new_keys, new = aggregates_of(asked)
        if old_keys == new_keys and not _ceases_to_expire(stored, asked):
            kept = [name for name, what in old.items() if new.get(name) == what]
            gone = [_describe_aggregate(name) for name in old if name not in kept]
            # A new value state may begin empty. A new aggregate would miss the earlier records.
            started = [n for n, what in new.items() if n in old or not what.startswith("last(")]
            return kept, gone, [f"aggregate {name!r}" for name in started if name not in kept]
    return [], [f"state {stored.name!r}"], [f"state {asked.name!r}"]
