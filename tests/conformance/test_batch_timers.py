"""Timers of whole batches over every state backend, compared with a set."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.conformance.state_job import BACKENDS, SUITE_BACKENDS, Job

from onceflow import BatchTimers
from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.state import KeyedBatchStates, KeyedStateStore, key_group_of

SCHEMA = pa.schema([("account", pa.string()), ("region", pa.int32())])
Key = tuple[str, int]


class Opened:
    """The timers of a store, in event time."""

    def __init__(self, store: KeyedStateStore) -> None:
        self.states = KeyedBatchStates(store, SCHEMA.names, SCHEMA)
        self.timers: BatchTimers = self.states.timers()
        self.states.finish_open()
        store.finish_open()

    def change(self, keys: Sequence[Key], times: dict[Key, int | None], *, delete: bool) -> None:
        """Register or delete a timer for each key."""
        accounts, regions = [key for key, _ in keys], [region for _, region in keys]
        batch = self.states.begin(pa.record_batch([accounts, regions], schema=SCHEMA), None)
        order: list[Any] = [tuple(key.values()) for key in batch.keys.to_pylist()]
        at_ms = pa.array([times[key] for key in order], pa.int64())
        if delete:
            self.timers.delete_event_time_timers(at_ms)
        else:
            self.timers.register_event_time_timers(at_ms)
        self.states.end()

    def fire(self, until_ms: int) -> list[tuple[str, int, int]]:
        """Return what is due, in the order in which it fires."""
        fired: list[tuple[str, int, int]] = []
        while (rows := self.timers.take_due(self.timers.event, until_ms)) is not None:
            fired += [tuple(row.values()) for row in rows.to_pylist()]
        assert [at_ms for *_, at_ms in fired] == sorted(at_ms for *_, at_ms in fired)
        return fired


def due(model: set[tuple[str, int, int]], until_ms: int) -> set[tuple[str, int, int]]:
    return {one for one in model if one[2] <= until_ms}


@pytest.mark.parametrize("seed", range(3))
def test_timers_of_batches_equal_a_set_through_snapshots_and_rescaling(job: Job, seed: int) -> None:
    rng = random.Random(seed)
    opened = Opened(job.open())
    store = job.stores[-1]
    model: set[tuple[str, int, int]] = set()
    now = -3_000
    for step in range(16):
        keys = [(f"k{rng.randrange(40)}", rng.randrange(2)) for _ in range(rng.choice([1, 9, 80]))]
        # Few times, so that they repeat, and some before 1970, where rows of RocksDB turn round.
        times = {key: rng.choice([None, *range(-5_000, 9_000, 500)]) for key in keys}
        delete = rng.random() < 0.3
        opened.change(keys, times, delete=delete)
        of_keys = {(*key, at_ms) for key, at_ms in times.items() if at_ms is not None}
        model = model - of_keys if delete else model | of_keys
        assert opened.timers.event.next_ms == min((one[2] for one in model), default=None)
        if rng.random() < 0.4:
            now += rng.randrange(2_000)
            fired = opened.fire(now)
            assert len(fired) == len(set(fired))
            assert set(fired) == due(model, now)
            model -= set(fired)
        if step % 5 == 4:
            handles = job.snapshot(store)
            for index in range(2):
                half = Opened(job.open(handles, index=index, parallelism=2))
                groups = job.context(index, 2).key_groups
                mine = {one for one in model if key_group_of(one[:2], 128) in groups}
                assert set(half.fire(10_000)) == mine
            opened = Opened(job.open(handles))
            store = job.stores[-1]
    assert set(opened.fire(10_000)) == model


@pytest.mark.parametrize("target", SUITE_BACKENDS)
def test_a_savepoint_brings_timers_of_batches_to_any_backend(job: Job, target: str) -> None:
    opened = Opened(job.open())
    times: dict[Key, int | None] = {("a", 1): 5, ("b", 1): -7, ("c", 2): None, ("d", 2): 2**63 - 2}
    opened.change(list(times), times, delete=False)
    handles = job.stores[-1].savepoint(job.next_checkpoint()).upload(job.storage)
    restored = Opened(job.open(handles, backend=BACKENDS[target]))
    assert restored.fire(2**63 - 1) == [("b", 1, -7), ("a", 1, 5), ("d", 2, 2**63 - 2)]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.decimal128(20, 2), [Decimal("-1.50"), Decimal("99999999999999999.99")]),
        (pa.timestamp("us", "Europe/Berlin"), [datetime(2024, 10, 27, 1, tzinfo=timezone.utc)]),
        (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)]),
        (pa.uint64(), [0, 2**64 - 1]),
        (pa.bool_(), [True, False]),
        (pa.dictionary(pa.int32(), pa.string()), ["x", "long" * 99]),
        (pa.binary(), [b"", b"\x00\xff"]),
    ],
    ids=str,
)
def test_timers_return_keys_of_any_type_as_they_came(
    job: Job, kind: pa.DataType, values: list[Any]
) -> None:
    schema = pa.schema([("k", kind)])
    states = KeyedBatchStates(job.open(), ["k"], schema)
    timers = states.timers()
    states.finish_open()
    rows = pa.record_batch([pa.array(values, kind)], schema=schema)
    batch = states.begin(rows, None)
    timers.register_processing_time_timers(pa.array(range(batch.key_count)))
    expected = batch.keys
    states.end()
    fired = timers.take_due(timers.processing, 100)
    assert fired is not None
    assert fired.select(["k"]).to_pylist() == expected.to_pylist()
    assert fired.schema.field("k").type == kind


@pytest.mark.parametrize(
    ("times", "says"),
    [
        (pa.array([1]), "was given 1 values, but the batch has 2 keys"),
        (pa.array([1.0, 2.0]), "whole numbers, but was given double"),
        (pa.array([1, 2], pa.timestamp("us")), "whole numbers, but was given timestamp"),
        (pa.array([1, 2**63 - 1]), r"9223372036854775807, .* to 9223372036854775806$"),
        (pa.array([1, 2**64 - 1], pa.uint64()), "milliseconds since 1970"),
    ],
    ids=["too few", "floats", "instants", "the end of time", "beyond 64 bits"],
)
def test_what_is_no_time_of_a_timer_is_told(job: Job, times: pa.Array, says: str) -> None:
    opened = Opened(job.open())
    opened.states.begin(pa.record_batch([["a", "b"], [1, 1]], schema=SCHEMA), None)
    with pytest.raises(BadStateValue, match=says):
        opened.timers.register_event_time_timers(times)
    opened.states.end()
    assert opened.timers.event.next_ms is None


def test_a_key_column_with_the_name_of_the_timers_times_is_refused(job: Job) -> None:
    states = KeyedBatchStates(job.open(), ["timer_ms"], pa.schema([("timer_ms", pa.int64())]))
    with pytest.raises(ConfigError, match="rename the key column"):
        states.timers()
