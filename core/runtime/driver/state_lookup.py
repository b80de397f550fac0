"""Looks up one key in the state of the last completed checkpoint. Any thread; changes nothing.

The lookup reads the files of the checkpoint and asks no subtask, so the job is not slowed. The
answer is as old as the checkpoint, whose number it contains.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.arrow.exact_arrays import array_of
from onceflow.core.errors import BadStateValue, CheckpointCorrupt, ConfigError
from onceflow.core.state.keys.key_codec import add_length, encode_key
from onceflow.core.state.keys.key_columns import read_key_columns
from onceflow.core.state.keys.key_groups import hash_keys, key_group_of, key_groups
from onceflow.core.state.keys.key_index import encode_keys
from onceflow.core.state.readers.state_columns import columns_of, shape_of_meta
from onceflow.core.state.readers.stored import StatePiece, list_pieces, read_metas_by_name
from onceflow.core.state.snapshots.canonical import StateRows
from onceflow.core.state.snapshots.state_meta import StateMeta
from onceflow.core.storage import JobStorage
from onceflow.core.storage.stored_checkpoints import (
    StoredCheckpoint,
    checkpoint_at,
    nearest,
)

LOOKUP_BYTES_MAX = 256 << 20
"""The largest number of bytes that the driver reads for one key, from all files with its
key group."""


@dataclass(frozen=True, slots=True)
class StateAnswer:
    """The value of a key in the state, and the checkpoint that contains it."""

    uid: str
    state: str
    kind: str
    key: Any
    found: bool
    value: Any
    """A value, a list, a list of (map key, value), or the aggregates by name; None if there is
    none."""
    as_of: str
    """Always `checkpoint`: the answer lacks later changes by the subtasks."""
    checkpoint: int
    completed_at_ms: int


def parse_keys(texts: Sequence[str]) -> list[Any]:
    """Return the keys that a user may mean by `texts`, one for each key column.

    A text may mean the string itself, and also a number, a date or another type that it parses as.
    """
    meant = [tuple(_values_meant(text)) for text in texts]
    return [key[0] if len(key) == 1 else key for key in product(*meant)]


def _values_meant(text: str) -> Iterable[Any]:
    yield text
    with contextlib.suppress(ValueError):
        yield int(text)
    if text.lower() in ("true", "false"):
        yield text.lower() == "true"
    with contextlib.suppress(ValueError):
        yield date.fromisoformat(text)
    with contextlib.suppress(ValueError):
        yield datetime.fromisoformat(text)
    with contextlib.suppress(InvalidOperation):
        if (number := Decimal(text)).is_finite():
            yield number


def look_up(storage: JobStorage, uid: str, state: str | None, keys: Sequence[Any]) -> StateAnswer:
    """Return the value of the first of `keys` that the last completed checkpoint contains.

    Raises:
        ConfigError: There is no checkpoint, operator or state; the message names the nearest. Or a
            key has several rows in this state, or the files to read exceed LOOKUP_BYTES_MAX.
        CheckpointCorrupt: A state file is damaged or missing.
    """
    stored = checkpoint_at(storage, None)
    while True:
        try:
            return _look_up_in(stored, uid, state, keys)
        except CheckpointCorrupt:
            # A newer checkpoint may have replaced it meanwhile, and its files are deleted.
            newer = checkpoint_at(storage, None)
            if newer.completed.checkpoint == stored.completed.checkpoint:
                raise
            stored = newer


def _look_up_in(
    stored: StoredCheckpoint, uid: str, state: str | None, keys: Sequence[Any]
) -> StateAnswer:
    pieces, meta = _find_state(stored, uid, state)
    _check_key(meta, uid)
    groups = stored.completed.max_parallelism
    for key in keys:
        encoded = _find_key(meta, key, groups)
        if encoded is None:
            continue
        key_bytes, group = encoded
        within = [piece for piece in pieces if piece.within(group)]
        _check_size(within, uid, meta)
        rows = [
            matching
            for piece in within
            for chunk in piece.rows(meta.name, stored.reader, range(group, group + 1))
            if len(matching := _matching(chunk, key_bytes, starts=meta.kind == "map"))
        ]
        if rows:
            return _answer(stored, uid, meta, key, _value(meta, rows))
    return _answer(stored, uid, meta, keys[0], None)


def _find_state(
    stored: StoredCheckpoint, uid: str, state: str | None
) -> tuple[list[StatePiece], StateMeta]:
    parts = stored.completed.operator(uid)
    if not parts:
        uids = {o.uid for s in stored.completed.snapshots for o in s.operators}
        raise ConfigError(f"{stored} contains no operator {uid!r}: {nearest(uid, uids)}")
    pieces = list_pieces(parts, stored.completed.max_parallelism)
    metas = read_metas_by_name(pieces, stored.reader)
    if state is None and len(metas) == 1:
        return pieces, next(iter(metas.values()))
    if state not in metas:
        what = f"no state {state!r}" if state else "several states, or none"
        there = nearest(state or "", metas)
        raise ConfigError(f"operator {uid!r} in {stored} holds {what}: {there}")
    return pieces, metas[state]


def _check_key(meta: StateMeta, uid: str) -> None:
    if meta.kind == "accumulators" and shape_of_meta(meta).namespaced:
        raise ConfigError(
            f"state {meta.name!r} of operator {uid!r} holds several rows a key, by windows,"
            " sessions or times: read it by spark.read.format('onceflow-state')"
        )


def _find_key(meta: StateMeta, key: Any, groups: int) -> tuple[bytes, int] | None:
    """Return the encoded `key` and its key group, or None if `key` does not fit the key's type."""
    try:
        if meta.kind == "map":
            return add_length(encode_key(key)), key_group_of(key, groups)
        if meta.kind != "accumulators":
            return encode_key(key), key_group_of(key, groups)
        kinds = shape_of_meta(meta).key_types
        parts = key if issubclass(type(key), tuple) else (key,)
        if len(parts) != len(kinds):
            return None
        arrays = [array_of([part], kind) for part, kind in zip(parts, kinds, strict=True)]
        encoded = bytes(encode_keys(read_key_columns(arrays))[0].as_py())
        # Hash the columns, not the value: the scale of a decimal counts.
        return encoded, int(key_groups(hash_keys(arrays), groups)[0])
    except (BadStateValue, pa.ArrowException, TypeError):
        return None


def _check_size(pieces: Sequence[StatePiece], uid: str, meta: StateMeta) -> None:
    size_bytes = sum(handle.size_bytes for piece in pieces for handle in piece.handles)
    if size_bytes > LOOKUP_BYTES_MAX:
        raise ConfigError(
            f"{size_bytes} bytes of {uid!r} hold the key's group, but a look-up reads at most"
            f" {LOOKUP_BYTES_MAX}: read state {meta.name!r} by"
            " spark.read.format('onceflow-state')"
        )


def _matching(rows: StateRows, key_bytes: bytes, *, starts: bool) -> StateRows:
    keys = rows.keys.cast(pa.large_binary())
    mask = pc.starts_with(keys, key_bytes) if starts else pc.equal(keys, key_bytes)
    inside = np.asarray(mask.to_numpy(zero_copy_only=False), np.bool_)
    return StateRows(rows.groups[inside], keys.filter(mask), rows.values.filter(mask))


def _value(meta: StateMeta, rows: Sequence[StateRows]) -> Any:
    columns = columns_of(meta, bytes(rows[0].keys[0].as_py()), "typed")
    records = [row for chunk in rows for row in columns.batch(chunk).to_pylist()]
    if meta.kind == "map":
        return [[row["map_key"], row["value"]] for row in records]
    return _readable(records[0]["value"], columns.schema.field("value").type, meta)


def _readable(value: Any, kind: pa.DataType, meta: StateMeta) -> Any:
    """Return the parsed value of a string column that holds JSON; other values unchanged."""
    is_text = meta.signature.endswith(":str")
    if isinstance(value, str) and pa.types.is_string(kind) and not is_text:
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def _answer(
    stored: StoredCheckpoint, uid: str, meta: StateMeta, key: Any, value: Any
) -> StateAnswer:
    completed = stored.completed
    return StateAnswer(
        uid=uid,
        state=meta.name,
        kind=meta.kind,
        key=key,
        found=value is not None,
        value=value,
        as_of="checkpoint",
        checkpoint=completed.checkpoint,
        completed_at_ms=completed.completed_at_ms,
    )
