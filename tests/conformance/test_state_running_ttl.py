"""Running aggregates that expire: who begins anew, what is deleted and when, how it may change."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.conformance.state_job import BACKENDS, MAX_PARALLELISM, SUITE_BACKENDS, Job
from tests.conformance.test_state_ttl import Wall
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow import sum_
from onceflow.core import state
from onceflow.core.errors import ConfigError, StateIncompatible
from onceflow.core.plan.aggregates import check_running_ttl, running_schema
from onceflow.core.plan.work import RunAggregates
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.keyed_operators import AggregateRunner
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.snapshots.canonical import read_canonical

TEN_S = state.StateTtlConfig(10)
TOTAL = state.AccumulatorColumn("total", "sum", pa.int64())
COLUMNS = [TOTAL, state.AccumulatorColumn("low", "min", pa.int64())]
KEYS = [f"key-{number}" for number in range(40)]


@pytest.fixture(params=SUITE_BACKENDS)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    running = Job(BACKENDS[request.param], tmp_path / "scratch", MemoryStorage())
    yield running
    running.close()


class Balances:
    """A store with a table of balances."""

    def __init__(
        self,
        job: Job,
        wall: Wall,
        ttl: state.StateTtlConfig | None = TEN_S,
        handles: Sequence[state.StateHandle] = (),
        **options: Any,
    ) -> None:
        self._job = job
        self.store: state.KeyedStateStore = job.open(handles, **options)
        self.table: state.AccumulatorTable = self.store.accumulators(
            "running", [pa.string()], COLUMNS, ttl=ttl
        )
        self.clock = StateClock(wall)
        if self.table.expiry is not None:
            self.table.expiry.clock = self.clock
        self.dropped = self.store.finish_open()

    def add(self, keys: Sequence[str], amounts: Sequence[int]) -> list[tuple[int, int]]:
        values = pa.array(amounts, pa.int64())
        given = {"total": values, "low": values}
        made = self.table.update([pa.array(keys, pa.string())], None, given)
        return list(zip(made["total"].tolist(), made["low"].tolist(), strict=True))

    def clean(self, rounds: int = 200) -> None:
        for _ in range(rounds):
            self.store.clean(7)

    def snapshot(self) -> tuple[state.StateHandle, ...]:
        return self._job.snapshot(self.store)

    def savepoint(self) -> tuple[state.StateHandle, ...]:
        return self.store.savepoint(self._job.next_checkpoint()).upload(self._job.storage)


def rows_in(handles: Sequence[state.StateHandle], job: Job) -> set[str]:
    """Return the keys that a savepoint holds, whether they have expired or not."""
    parts = read_canonical(job.storage, handles, job.context())
    return {key.decode() for _, rows in parts for key in rows.keys.to_pylist()}


def test_a_balance_begins_anew_when_its_time_has_passed_since_its_last_record(job: Job) -> None:
    wall = Wall()
    first = Balances(job, wall)
    assert first.add(["a", "b", "a"], [5, 1, 2]) == [(5, 5), (1, 1), (7, 2)]
    wall.now_s += 6
    assert first.add(["b"], [3]) == [(4, 1)]
    again = Balances(job, wall, handles=first.snapshot())
    wall.now_s += 4
    for balances in (first, again):
        # Of "a" the first record came 10 s ago, of "b" the last one 4 s ago.
        assert balances.add(["b", "a", "a"], [1, 10, 20]) == [(5, 1), (10, 10), (30, 10)]
    wall.now_s += 10
    assert again.add(["a", "b"], [9, 9]) == [(9, 9), (9, 9)]


def test_balances_that_expire_equal_a_model_through_snapshots_and_rescaling(job: Job) -> None:
    """A clock that jumps, back too: that makes nothing live again."""
    rng = random.Random(12)
    wall = Wall()
    parts = [Balances(job, wall)]
    model: dict[str, tuple[int, int, float]] = {}
    latest_s = wall.now_s
    for step in range(120):
        wall.now_s += rng.choice([0.0, 1.0, 3.0, 4.0, -2.0])
        latest_s = max(latest_s, wall.now_s)
        batch = [(rng.choice(KEYS), rng.randrange(-50, 50)) for _ in range(rng.randrange(1, 30))]
        expected: dict[str, list[tuple[int, int]]] = {}
        for key, amount in batch:
            total, low, used_s = model.get(key, (0, 99, 0.0))
            if key not in expected and used_s + 10 <= latest_s:
                total, low = 0, 99
            model[key] = (total + amount, min(low, amount), latest_s)
            expected.setdefault(key, []).append(model[key][:2])
        for index, part in enumerate(parts):
            part.clock.now_ms()
            groups = job.context(index, len(parts)).key_groups
            mine = [one for one in batch if state.key_group_of(one[0], MAX_PARALLELISM) in groups]
            made = part.add([key for key, _ in mine], [amount for _, amount in mine])
            found: dict[str, list[tuple[int, int]]] = {}
            for (key, _), one in zip(mine, made, strict=True):
                found.setdefault(key, []).append(one)
            assert found == {key: expected[key] for key in found}
            part.clean(rng.randrange(4))
        if step % 30 == 29:
            # A new process does not know of the clock that was ahead.
            wall.now_s = latest_s
            handles = [handle for part in parts for handle in part.snapshot()]
            count = rng.choice([1, 2, 3])
            parts = [
                Balances(job, wall, handles=handles, index=index, parallelism=count)
                for index in range(count)
            ]


def test_what_has_expired_leaves_memory_and_disk_as_records_come(
    job: Job,
) -> None:
    wall = Wall()
    balances = Balances(job, wall, replace(TEN_S, cleanup_full_snapshot=False))
    balances.add(KEYS, range(len(KEYS)))
    balances.snapshot()
    wall.now_s += 6
    balances.add(KEYS[:3], [1, 1, 1])
    wall.now_s += 6
    assert rows_in(balances.savepoint(), job) == set(KEYS)
    balances.clean()
    assert rows_in(balances.savepoint(), job) == set(KEYS[:3])
    assert balances.add(KEYS[:4], [1] * 4) == [(2, 0), (3, 1), (4, 1), (1, 1)]


def test_full_snapshots_leave_out_what_has_expired(job: Job) -> None:
    wall = Wall()
    balances = Balances(job, wall)
    balances.add(KEYS, range(len(KEYS)))
    wall.now_s += 6
    balances.add(KEYS[:3], [1, 1, 1])
    wall.now_s += 6
    assert rows_in(balances.savepoint(), job) == set(KEYS[:3])


def test_balances_that_did_not_expire_live_from_the_restore_on(job: Job) -> None:
    first = Balances(job, Wall(), None)
    first.add(["a"], [5])
    wall = Wall()
    wall.now_s = time.time() + 5
    # The restore takes the machine's own clock.
    again = Balances(job, wall, handles=first.snapshot())
    assert again.add(["a"], [1]) == [(6, 1)]
    wall.now_s += 10
    assert again.add(["a"], [1]) == [(1, 1)]


def test_a_time_to_live_is_changed_and_not_taken_away(job: Job) -> None:
    wall = Wall()
    first = Balances(job, wall)
    first.add(["a"], [5])
    handles = first.snapshot()
    wall.now_s += 15
    longer = Balances(job, wall, state.StateTtlConfig(20), handles)
    assert longer.add(["a"], [1]) == [(6, 1)]
    with pytest.raises(StateIncompatible, match="time to live cannot be removed"):
        Balances(job, wall, None, handles)
    dropped = Balances(job, wall, None, handles, allow_non_restored_state=True)
    assert dropped.dropped == ("state 'running' of op",)
    assert dropped.add(["a"], [1]) == [(1, 1)]


def test_the_operator_deletes_what_has_expired_as_its_records_come(job: Job) -> None:
    schema = pa.schema([("key", pa.string()), ("amount", pa.int64())])
    aggregates = {"total": sum_("amount")}
    work = RunAggregates(("key",), aggregates, TEN_S)
    store = job.open()
    operator = AggregateRunner("op", work, store, schema, running_schema(schema, aggregates))
    made: list[int] = []
    operator.outputs.append(lambda batch: made.extend(batch.rows.column("total").to_pylist()))
    wall = Wall()
    column = state.AccumulatorColumn("total", "sum", pa.int64())
    table = store.accumulators("running", [pa.string()], [column], ttl=TEN_S)
    assert table.expiry is not None
    table.expiry.clock = StateClock(wall)

    def take(keys: Sequence[str]) -> None:
        batch = pa.record_batch([pa.array(keys), pa.array([1] * len(keys))], schema=schema)
        operator.receive(Batch(batch))

    take(KEYS)
    take(KEYS[:1])
    wall.now_s += 11
    for _ in range(len(KEYS)):
        take(["another"])
    assert made == [1] * len(KEYS) + [2] + list(range(1, len(KEYS) + 1))
    pending = operator.savepoint(job.next_checkpoint())
    assert rows_in(pending.upload(job.storage).keyed, job) == {"another"}
    take(KEYS[:1])
    assert made[-1] == 1


@pytest.mark.parametrize(
    ("ttl", "says"),
    [
        (state.StateTtlConfig(1, visibility="return_expired_if_not_cleaned_up"), "starts again"),
        (sum_("amount"), "give a StateTtlConfig; an aggregate needs another name"),
    ],
    ids=["visibility", "an aggregate"],
)
def test_what_running_cannot_have_as_a_time_to_live_is_refused(ttl: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_running_ttl(ttl)
