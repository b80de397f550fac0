"""Speed of keyed state: `python -m benchmarks.state --keys 1000000 --json`.

Each figure is the median of `--runs` runs on one thread, after one run to warm up. Figures a row or
a record are processor time, the others are time on the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.keyed_pairs import pair_figures
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state import (
    AccumulatorColumn,
    HeapBackend,
    KeyedStateStore,
    RocksDBBackend,
    StateBackend,
    StateContext,
    StateHandle,
    ValueStateDescriptor,
    hash_keys,
)

BATCH_ROWS = 10_000
VALUE_BYTES = 100
MAX_PARALLELISM = 128
BALANCE = ValueStateDescriptor[int]("balance", int, default=0)
PAYLOAD = ValueStateDescriptor[bytes]("payload", bytes)

Figures = dict[str, float]


class CountingStorage:
    """Takes snapshots, copies large files as a local file system would, and counts bytes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.bytes_written = 0

    def write(
        self, name: str, data: bytes | memoryview | pa.Buffer, *, key_groups: range | None = None
    ) -> StateHandle:
        path = self._root / name
        path.write_bytes(data)
        return self._handle(name, path, key_groups, shared=False)

    def write_chunks(
        self,
        name: str,
        chunks: Iterable[pa.Buffer],
        *,
        shared: bool = False,
        key_groups: range | None = None,
    ) -> StateHandle:
        path = self._root / name
        with path.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
        return self._handle(name, path, key_groups, shared=shared)

    def write_file(
        self, name: str, path: Path, *, shared: bool, key_groups: range | None = None
    ) -> StateHandle:
        target = self._root / name
        target.write_bytes(path.read_bytes())
        return self._handle(name, target, key_groups, shared=shared)

    def _handle(
        self, name: str, path: Path, key_groups: range | None, *, shared: bool
    ) -> StateHandle:
        size = path.stat().st_size
        self.bytes_written += size
        groups = key_groups or range(0)
        return StateHandle(name, str(path), size, "", groups.start, groups.stop - 1, shared)

    def read(self, handle: StateHandle) -> bytes:
        return Path(handle.path).read_bytes()

    def head(self, handle: StateHandle) -> bytes:
        return self.read(handle)

    def read_to(self, handle: StateHandle, path: Path) -> None:
        path.write_bytes(self.read(handle))


def median_s(work: Callable[[], object], runs: int) -> float:
    work()
    taken: list[float] = []
    for _ in range(runs):
        started = time.thread_time()
        work()
        taken.append(time.thread_time() - started)
    return statistics.median(taken)


def opened(
    backend: StateBackend, scratch: Path, storage: CountingStorage,
    handles: Sequence[StateHandle] = (),
) -> KeyedStateStore:  # fmt: skip
    groups = range(MAX_PARALLELISM)
    context = StateContext("bench", 0, groups, MAX_PARALLELISM, Path(tempfile.mkdtemp(dir=scratch)))
    return backend.open(context, handles, storage)


def accounts(rng: np.random.Generator, keys: int, shape: str) -> pa.Array:
    numbers = (
        rng.integers(0, keys, BATCH_ROWS)
        if shape == "uniform"
        else np.minimum(rng.zipf(1.2, BATCH_ROWS), keys) - 1
    )
    return pa.array([f"acct-{number:06d}" for number in numbers.tolist()])


def running_ns_per_row(store: KeyedStateStore, shape: str, given_hashes: bool, runs: int) -> float:
    """Nanoseconds a row of a running sum over 100,000 text keys, all of them known."""
    rng = np.random.default_rng(7)
    table = store.accumulators(
        f"{shape} {given_hashes}", [pa.string()], [AccumulatorColumn("sum", "sum", pa.int64())]
    )
    batches: list[tuple[list[pa.Array], Any, dict[str, pa.Array]]] = []
    for _ in range(40):
        keys = [accounts(rng, 100_000, shape)]
        amounts = pa.array(rng.integers(-500, 1000, BATCH_ROWS))
        batches.append((keys, hash_keys(keys) if given_hashes else None, {"sum": amounts}))

    def work() -> None:
        for keys, hashes, values in batches:
            table.update(keys, hashes, values)

    return median_s(work, runs) / (len(batches) * BATCH_ROWS) * 1e9


def per_record_us(store: KeyedStateStore, keys: Sequence[str], runs: int) -> float:
    """Microseconds of set_current_key, get and set, in the order given."""
    state = store.value_state(BALANCE)
    set_key, get, put = store.set_current_key, state.get, state.set

    def work() -> None:
        for start in range(0, len(keys), BATCH_ROWS):
            batch = keys[start : start + BATCH_ROWS]
            store.prefetch(batch)
            for key in batch:
                set_key(key)
                put(get() + 1)

    return median_s(work, runs) / len(keys) * 1e6


def snapshots(store: KeyedStateStore, storage: CountingStorage, keys: int, runs: int) -> Figures:
    """Snapshots of `keys` values of 100 bytes, with one in a hundred changed between them."""
    state = store.value_state(PAYLOAD)
    for key in range(keys):
        store.set_current_key(key)
        state.set(os.urandom(VALUE_BYTES))
    rng = random.Random(3)
    sync: list[float] = []
    upload: list[float] = []
    written: list[int] = []
    for number in range(1, runs + 2):
        before = storage.bytes_written
        started = time.perf_counter()
        pending = store.snapshot(CheckpointId(number))
        frozen = time.perf_counter()
        pending.upload(storage)
        sync.append(frozen - started)
        upload.append(time.perf_counter() - frozen)
        written.append(storage.bytes_written - before)
        store.notify_completed(CheckpointId(number))
        changing = rng.sample(range(keys), keys // 100)
        for start in range(0, len(changing), BATCH_ROWS // 4):
            batch = changing[start : start + BATCH_ROWS // 4]
            store.prefetch(batch)
            for key in batch:
                store.set_current_key(key)
                state.set(os.urandom(VALUE_BYTES))
    changed = keys // 100 * VALUE_BYTES
    return {
        "first snapshot MB": written[0] / 1e6,
        "snapshot sync ms": statistics.median(sync[1:]) * 1e3,
        "snapshot sync ms, worst": max(sync) * 1e3,
        "snapshot async ms": statistics.median(upload[1:]) * 1e3,
        "snapshot bytes / changed bytes, median": statistics.median(written[1:]) / changed,
        "snapshot bytes / changed bytes, mean from the third": statistics.mean(written[2:])
        / changed,
    }


def table_snapshot(store: KeyedStateStore, storage: CountingStorage, keys: int) -> Figures:
    """A snapshot of running sums of `keys` keys, all changed."""
    table = store.accumulators(
        "totals", [pa.string()], [AccumulatorColumn("sum", "sum", pa.int64())]
    )
    for start in range(0, keys, BATCH_ROWS):
        names = [f"acct-{number:07d}" for number in range(start, min(start + BATCH_ROWS, keys))]
        table.update([pa.array(names)], None, {"sum": pa.array(range(len(names)))})
    started = time.perf_counter()
    pending = store.snapshot(CheckpointId(1000))
    frozen = time.perf_counter()
    pending.upload(storage)
    return {
        "table of all keys: sync ms": (frozen - started) * 1e3,
        "table of all keys: async ms": (time.perf_counter() - frozen) * 1e3,
    }


def slowdown_during_upload(store: KeyedStateStore, storage: CountingStorage, runs: int) -> Figures:
    """How much slower batches are processed while another thread uploads a snapshot."""
    alone = running_ns_per_row(store, "uniform", True, runs)
    pending = store.snapshot(CheckpointId(2000))
    thread = threading.Thread(target=pending.upload, args=(storage,))
    keys = [accounts(np.random.default_rng(5), 100_000, "uniform")]
    table = store.accumulators(
        "uniform True", [pa.string()], [AccumulatorColumn("sum", "sum", pa.int64())]
    )
    values = {"sum": pa.array(range(BATCH_ROWS))}
    hashes = hash_keys(keys)
    batches = 0
    started = time.perf_counter()
    thread.start()
    while thread.is_alive():
        table.update(keys, hashes, values)
        batches += 1
    during = (time.perf_counter() - started) / max(batches, 1) / BATCH_ROWS * 1e9
    return {"upload under way: running sum, times as slow": during / alone}


def measure(name: str, backend: StateBackend, keys: int, runs: int) -> Figures:
    hot = [f"acct-{number:06d}" for number in range(50_000)]
    random.Random(1).shuffle(hot)
    wide = [f"acct-{number:06d}" for number in range(keys)]
    random.Random(2).shuffle(wide)
    with tempfile.TemporaryDirectory() as root:
        scratch = Path(root)
        (scratch / "storage").mkdir()
        storage = CountingStorage(scratch / "storage")
        store = opened(backend, scratch, storage)
        figures = {
            "running sum ns/row, uniform": running_ns_per_row(store, "uniform", False, runs),
            "running sum ns/row, uniform, hashed": running_ns_per_row(store, "uniform", True, runs),
            "running sum ns/row, zipf": running_ns_per_row(store, "zipf", False, runs),
            "record us, 50k keys": per_record_us(store, hot, runs),
            "record us, all keys": per_record_us(store, wide, 1),
        }
        store.close()
        store = opened(backend, scratch, storage)
        figures |= snapshots(store, storage, keys, max(runs, 20))
        figures |= slowdown_during_upload(store, storage, runs)
        store.close()
        store = opened(backend, scratch, storage)
        figures |= table_snapshot(store, storage, keys)
        store.close()
        figures |= pair_figures(lambda: opened(backend, scratch, storage), keys, runs)
    return {f"{name}: {figure}": round(value, 3) for figure, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    keys = [accounts(np.random.default_rng(5), 100_000, "uniform")]
    figures: Figures = {
        "hash_keys ns/row": round(median_s(lambda: hash_keys(keys), 50) / BATCH_ROWS * 1e9, 1)
    }
    figures |= measure("heap", HeapBackend(), options.keys, options.runs)
    figures |= measure("rocksdb", RocksDBBackend(), options.keys, options.runs)
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        for figure, value in figures.items():
            print(f"{figure:60s} {value:12,.2f}")


if __name__ == "__main__":
    main()
