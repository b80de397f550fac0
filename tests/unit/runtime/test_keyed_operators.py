"""Keyed state is frozen in the form that is asked for. Running aggregates join their records."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow import HeapBackend, StateTtlConfig, count, sum_
from onceflow.core.errors import UserFunctionError
from onceflow.core.plan.work import RunAggregates
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.keyed_operators import (
    AggregateRunner,
    KeyedOperator,
    with_event_time,
)
from onceflow.core.runtime.dataflow.operators import PendingSnapshot
from onceflow.core.runtime.dataflow.restored_event_time import EVENT_TIME
from onceflow.core.state import KeyedStateStore, StateContext

_SCHEMA = pa.schema([("key", pa.int64()), ("amount", pa.int64())])
_FIRST = CheckpointId(1)
_HANDLE = StateHandle("keyed", "path", 1, "sum", 0, 7)


class _Store:
    """A store that notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> Any:
            self.calls.append(" ".join(map(str, (name, *arguments))))
            return self

        return call

    def upload(self, writer: object) -> tuple[StateHandle, ...]:
        del writer
        return (_HANDLE,)


class _Operator(KeyedOperator):
    def process(self, batch: Batch) -> None:
        raise NotImplementedError

    def _before_snapshot(self, checkpoint: CheckpointId) -> None:
        self.store.set_current_key(f"before {checkpoint}")


def _operator() -> tuple[_Operator, _Store]:
    store = _Store()
    return _Operator("op", cast("KeyedStateStore", store)), store


@pytest.mark.parametrize("form", ["snapshot", "savepoint", "native_savepoint"])
def test_state_is_frozen_after_the_work_that_belongs_to_the_checkpoint(form: str) -> None:
    operator, store = _operator()
    operator.described = {"key": "integer"}
    pending = getattr(operator, form)(_FIRST)
    assert store.calls == ["set_current_key before 1", f"{form} 1"]
    taken = pending.upload(MemoryStorage())
    assert (taken.uid, taken.keyed, taken.described) == ("op", (_HANDLE,), {"key": "integer"})
    pending.discard()
    assert store.calls[-1] == "discard"


def test_state_hears_which_checkpoints_are_decided_or_aborted() -> None:
    operator, store = _operator()
    operator.on_completed(_FIRST)
    operator.on_aborted(CheckpointId(2))
    operator.close()
    assert store.calls == ["notify_completed 1", "notify_aborted 2", "close"]
    assert operator.dropped == ()


def test_event_time_joins_a_snapshot_and_does_not_keep_it_from_being_discarded() -> None:
    operator, store = _operator()
    pending: PendingSnapshot = with_event_time(operator.snapshot(_FIRST), (b"time",))
    taken = pending.upload(MemoryStorage())
    assert (taken.keyed, taken.lists) == ((_HANDLE,), {EVENT_TIME: (b"time",)})
    pending.discard()
    assert store.calls[-1] == "discard"


def _run_aggregates(
    ttl: StateTtlConfig | None = None,
) -> tuple[AggregateRunner, list[pa.RecordBatch]]:
    aggregates = {"n": count(), "total": sum_("amount")}
    schema = pa.schema(
        [*_SCHEMA, *((name, one.result_type(_SCHEMA)) for name, one in aggregates.items())]
    )
    context = StateContext("op", 0, range(8), 8, Path("/nowhere"))
    store = HeapBackend().open(context, (), MemoryStorage())
    runner = AggregateRunner("op", RunAggregates(("key",), aggregates, ttl), store, _SCHEMA, schema)
    emitted: list[pa.RecordBatch] = []
    runner.outputs.append(lambda batch: emitted.append(batch.rows))
    return runner, emitted


def _rows(*rows: tuple[int, int]) -> Batch:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(list(column), pa.int64()) for column in columns]
    return Batch(pa.record_batch(arrays, schema=_SCHEMA))


def test_each_record_has_the_aggregates_up_to_itself() -> None:
    runner, emitted = _run_aggregates()
    runner.process(_rows((1, 10), (2, 20), (1, 30)))
    runner.process(_rows((1, 5)))
    assert [tuple(row.values()) for batch in emitted for row in batch.to_pylist()] == [
        (1, 10, 1, 10),
        (2, 20, 1, 20),
        (1, 30, 2, 40),
        (1, 5, 3, 45),
    ]
    assert runner.dropped == ()
    runner.close()


@pytest.mark.parametrize(("entries", "cleaned"), [(None, []), (3, [6, 3])])
def test_expired_keys_are_looked_for_by_the_number_of_records(
    monkeypatch: pytest.MonkeyPatch, entries: int | None, cleaned: list[int]
) -> None:
    ttl = None if entries is None else StateTtlConfig(60.0, cleanup_incrementally=entries)
    runner, _ = _run_aggregates(ttl)
    counts: list[int] = []
    monkeypatch.setattr(runner.store, "clean", counts.append)
    runner.process(_rows((1, 10), (2, 20)))
    runner.process(_rows((1, 5)))
    assert counts == cleaned


def test_a_sum_that_overflows_names_its_record() -> None:
    runner, _ = _run_aggregates()
    largest = 2**63 - 1
    with pytest.raises(UserFunctionError, match=f"'amount': {largest}"):
        runner.process(_rows((1, 10), (1, largest)))
