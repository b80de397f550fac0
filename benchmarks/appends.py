"""How long a decision takes to be durable, beside the store's own creation of as many bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.spread import percentile
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SubtaskSnapshot,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.storage import CheckpointStorage
from onceflow.core.storage.filesystems.filesystem import Created, CreatesAtomically

APPENDS = 120
_SUBTASKS = 4
_INLINE_BYTES = 1_000
_KEY_GROUPS = 128


@dataclass(frozen=True, slots=True)
class Appends:
    """Milliseconds, of `APPENDS` in a row with nothing beside them."""

    place: str
    record_bytes: int
    append_p50_ms: float
    append_p95_ms: float
    create_p50_ms: float
    create_p95_ms: float


def appends(
    place: str, storage: CheckpointStorage, files: CreatesAtomically, count: int = APPENDS
) -> Appends:
    """Append decisions as a job does, in turn with bare creations in the same place."""
    job = storage.open("appends")
    log = job.log.claim("benchmark")
    record_bytes = _SUBTASKS * (_INLINE_BYTES + 250)
    appended: list[float] = []
    created: list[float] = []
    for number in range(1, count + 1):
        completed = _completed(number, log.attempt)
        appended.append(_ms(lambda completed=completed: log.append(completed)))  # type: ignore[misc]
        log.prune(CheckpointId(number))
        path, data = f"bare/{number}", os.urandom(record_bytes)
        created.append(_ms(lambda p=path, d=data: _create(files, p, d)))  # type: ignore[misc]
    return Appends(
        place,
        record_bytes,
        percentile(appended, 50),
        percentile(appended, 95),
        percentile(created, 50),
        percentile(created, 95),
    )


def _completed(number: int, attempt: AttemptId) -> CompletedCheckpoint:
    snapshots = tuple(
        SubtaskSnapshot(
            SubtaskRef("balance", index),
            (OperatorSnapshot("balance", lists={"inline": (os.urandom(_INLINE_BYTES),)}),),
        )
        for index in range(_SUBTASKS)
    )
    now_ms = time.time_ns() // 1_000_000
    return CompletedCheckpoint(
        CheckpointId(number), attempt, _SUBTASKS, _KEY_GROUPS, snapshots, now_ms, now_ms
    )


def _create(files: CreatesAtomically, path: str, data: bytes) -> None:
    if files.create_if_absent(path, data) != Created():
        raise AssertionError(f"{files.location(path)} was there")


def _ms(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000
