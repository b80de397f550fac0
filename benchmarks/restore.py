"""How fast RocksDB state comes back from a directory, beside a plain copy of the same files.

Both begin with files that no longer are in the memory of the system (`posix_fadvise`), copy four
files at a time, and end with the bytes handed to the system. A restore also checks every byte,
opens the database, and reads the first value.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.spread import Spread
from onceflow import RocksDBBackend, ValueStateDescriptor
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.state import KeyedStateStore, StateContext, StateHandle
from onceflow.core.storage import FileSystemStorage, JobStorage

STATE_BYTES = 1_000_000_000
_VALUE_BYTES = 10_000
_KEY_GROUPS = 128
_FILES_AT_ONCE = 4
_PAYLOAD = ValueStateDescriptor[bytes]("payload", bytes)


@dataclass(frozen=True, slots=True)
class Restores:
    """Seconds of each turn, and the bytes."""

    state_bytes: int
    restore_s: tuple[float, ...]
    copy_s: tuple[float, ...]

    @property
    def of_bandwidth(self) -> Spread:
        """The restore's bytes a second over the copy's."""
        return Spread.of(c / r for c, r in zip(self.copy_s, self.restore_s, strict=True))


def restores(
    directory: Path, runs: int, say: Callable[[str], None], *, state_bytes: int = STATE_BYTES
) -> Restores:
    """Fill a RocksDB, take a checkpoint of it, and restore that `runs` times in `directory`."""
    storage = FileSystemStorage(str(directory / "checkpoints")).open("restored")
    handles = _checkpoint(storage, directory, state_bytes)
    files = [Path(directory, "checkpoints", "restored", one.path) for one in handles if one.path]
    size_bytes = sum(path.stat().st_size for path in files)
    say(f"a checkpoint of {size_bytes / 1e6:,.0f} MB in {len(files)} files")
    restored: list[float] = []
    copied: list[float] = []
    for run in range(runs):
        both = [(restored, _restore_s), (copied, _copy_s)]
        for seconds, measure in both if run % 2 == 0 else reversed(both):
            _forget(files)
            seconds.append(measure(storage, handles, files, directory))
        say(f"run {run + 1} of {runs}: restored in {restored[-1]} s, copied in {copied[-1]} s")
    return Restores(size_bytes, tuple(restored), tuple(copied))


def _checkpoint(storage: JobStorage, directory: Path, state_bytes: int) -> tuple[StateHandle, ...]:
    store = _opened(storage, (), directory)
    payload = store.value_state(_PAYLOAD)
    for number in range(state_bytes // _VALUE_BYTES):
        store.set_current_key(number)
        payload.set(os.urandom(_VALUE_BYTES))  # nothing that compression could shorten
    writer = storage.writer(AttemptId(1), CheckpointId(1), "restored", 0)
    handles = store.snapshot(CheckpointId(1)).upload(writer)
    store.close()
    return handles


def _opened(
    storage: JobStorage, handles: Sequence[StateHandle], directory: Path
) -> KeyedStateStore:
    scratch = Path(tempfile.mkdtemp(dir=directory))
    context = StateContext("restored", 0, range(_KEY_GROUPS), _KEY_GROUPS, scratch)
    return RocksDBBackend().open(context, handles, storage.reader())


def _restore_s(
    storage: JobStorage, handles: Sequence[StateHandle], _: Sequence[Path], directory: Path
) -> float:
    began = time.perf_counter()
    store = _opened(storage, handles, directory)
    payload = store.value_state(_PAYLOAD)
    store.set_current_key(0)
    if len(payload.get()) != _VALUE_BYTES:
        raise AssertionError("the restored value is not what was written")
    seconds = time.perf_counter() - began
    store.close()
    return round(seconds, 3)


def _copy_s(
    _: JobStorage, __: Sequence[StateHandle], files: Sequence[Path], directory: Path
) -> float:
    target = Path(tempfile.mkdtemp(dir=directory))
    began = time.perf_counter()
    targets = [target / path.name for path in files]
    with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        list(threads.map(_copy, files, targets))
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return round(seconds, 3)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb", buffering=0) as taken, target.open("xb", buffering=0) as given:
        shutil.copyfileobj(taken, given, 1 << 20)


def _forget(files: Sequence[Path]) -> None:
    """Have the system write `files` and keep none of them in memory."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
