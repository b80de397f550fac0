"""Deduplication over every state backend, compared with a dictionary of each key's record."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.conformance.keyed_run import KeyedRun
from tests.conformance.state_job import Job

from onceflow.core.api.users_mistakes import require_order
from onceflow.core.errors import ConfigError, UserFunctionError
from onceflow.core.plan.work import Deduplicate, Keep
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.deduplication import Deduplicator
from onceflow.core.state import (
    AccumulatorColumn,
    StateTtlConfig,
)
from onceflow.core.state.api.context import StateClock

Row = dict[str, Any]


def schema_of(order: pa.DataType) -> pa.Schema:
    return pa.schema([("key", pa.string()), ("at", order), ("id", pa.int64())])


def run(
    job: Job,
    work: Deduplicate,
    schema: pa.Schema,
    parallelism: int,
    restored: Sequence[OperatorSnapshot] = (),
) -> KeyedRun[Deduplicator]:
    return KeyedRun(
        job,
        lambda store: Deduplicator("op", work, store, schema),
        schema,
        key="key",
        parallelism=parallelism,
        restored=restored,
    )


class Model:
    """The record of each key, and the records that replaced another one."""

    def __init__(self, work: Deduplicate) -> None:
        self._work = work
        self.kept: dict[str, Row] = {}

    def take(self, rows: Sequence[Row]) -> list[Row]:
        """Take in a batch; return the kept record of each key whose record has changed."""
        changed: dict[str, Row] = {}
        for row in rows:
            before = self.kept.get(row["key"])
            if before is None or self._is_better(row, before):
                self.kept[row["key"]] = changed[row["key"]] = row
        return list(changed.values())

    def _is_better(self, row: Row, before: Row) -> bool:
        if self._work.by is None:
            return self._work.keep is Keep.LAST
        new, old = row["at"], before["at"]
        return bool(new < old if self._work.keep is Keep.FIRST else new >= old)


ORDERS: dict[str, tuple[pa.DataType, Callable[[random.Random], object]]] = {
    "int": (pa.int64(), lambda rng: rng.randrange(-5, 5)),
    "decimal": (pa.decimal128(38, 2), lambda rng: Decimal(rng.randrange(-500, 500)).scaleb(-2)),
    "text": (pa.string(), lambda rng: rng.choice(["", "a", "b", "z", "ä", "\U0001f600"])),
    "float": (pa.float64(), lambda rng: rng.choice([-1.5, 0.0, 2.0, float("inf")])),
}


@pytest.mark.parametrize("keep", Keep)
@pytest.mark.parametrize("order", [None, *ORDERS])
def test_each_key_has_the_record_of_the_model_through_snapshots_and_rescaling(
    job: Job, keep: Keep, order: str | None
) -> None:
    rng = random.Random(f"{keep} {order}")
    kind, draw = ORDERS[order or "int"]
    work, schema = Deduplicate(("key",), keep, "at" if order else None), schema_of(kind)
    model, running = Model(work), run(job, work, schema, 2)
    for step in range(24):
        rows: list[Row] = [
            {"key": f"k{rng.randrange(rng.choice([2, 40]))}", "at": draw(rng), "id": number}
            for number in range(rng.choice([0, 1, 20, 60]))
        ]
        emitted = running.take(rows)
        assert sorted(emitted, key=str) == sorted(model.take(rows), key=str)
        assert len({row["key"] for row in emitted}) == len(emitted), "one record a key and batch"
        if step % 6 == 5:
            snapshots = running.snapshot(savepoint=step == 11)
            running = run(job, work, schema, rng.choice([1, 2, 3]), snapshots)


OF_EACH_TYPE: dict[str, tuple[pa.DataType, object, object]] = {
    **{str(kind): (kind, 1, 2) for kind in (pa.int8(), pa.uint64(), pa.int64())},
    **{str(kind): (kind, -1.5, float("nan")) for kind in (pa.float32(), pa.float64())},
    "halffloat": (pa.float16(), np.float16(-1.5), np.float16(2.5)),
    **{
        str(kind): (kind, Decimal("-1.50"), Decimal("1.50"))
        for kind in (
            pa.decimal32(5, 2),
            pa.decimal64(10, 2),
            pa.decimal128(20, 2),
            pa.decimal256(50, 2),
        )
    },
    **{str(kind): (kind, "Z", "a") for kind in (pa.string(), pa.large_string())},
    **{str(kind): (kind, b"", b"\xff") for kind in (pa.binary(), pa.large_binary())},
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), "a", "b"),
    **{
        str(kind): (kind, dt.date(1969, 1, 1), dt.date(2026, 1, 1))
        for kind in (pa.date32(), pa.date64())
    },
    **{
        str(kind): (kind, dt.time(0, 0, 1), dt.time(23))
        for kind in (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))
    },
    **{
        str(kind): (kind, dt.datetime(1, 1, 1), dt.datetime(2026, 1, 1))
        for kind in (pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("us"))
    },
    "timestamp with zone": (
        pa.timestamp("us", "UTC"),
        dt.datetime(1, 1, 1, tzinfo=dt.timezone.utc),
        dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
    ),
}


@pytest.mark.parametrize("name", OF_EACH_TYPE)
def test_values_of_each_type_that_is_accepted_have_an_order(job: Job, name: str) -> None:
    kind, low, high = OF_EACH_TYPE[name]
    schema = schema_of(kind)
    require_order("at", schema, ("key",), "deduplicate")
    work = Deduplicate(("key",), Keep.LAST, "at")
    running = run(job, work, schema, 1)

    def take(*values: object) -> list[int]:
        keys, ids = pa.array(["a"] * len(values)), pa.array(range(len(values)), pa.int64())
        columns = [keys, pa.array(list(values), kind), ids]
        running.operators[0].receive(Batch(pa.record_batch(columns, schema=schema)))
        return [record["id"] for record in running.take_emitted()]

    assert take(low, high, low) == [1]
    running = run(job, work, schema, 1, running.snapshot(savepoint=False))
    assert take(low) == []
    assert take(low, high) == [1]


@pytest.mark.parametrize(
    "kind",
    [pa.bool_(), pa.list_(pa.int64()), pa.string_view(), pa.duration("s")],
    ids=str,
)
def test_a_type_without_an_order_is_refused_by_name(kind: pa.DataType) -> None:
    with pytest.raises(ConfigError, match="have no order; give a column of"):
        require_order("at", schema_of(kind), ("key",), "deduplicate")


def test_the_last_record_by_arrival_needs_no_state(job: Job) -> None:
    work = Deduplicate(("key",), Keep.LAST, None)
    running = run(job, work, schema_of(pa.int64()), 1)
    running.take([{"key": f"k{number}", "at": 0, "id": number} for number in range(5_000)])
    assert sum(handle.size_bytes for handle in running.snapshot(savepoint=True)[0].keyed) < 1_200


def test_a_key_without_a_record_for_its_time_to_live_is_new_again(job: Job) -> None:
    now_s = 1_000.0
    work = Deduplicate(("key",), Keep.FIRST, None, StateTtlConfig(10))
    running = run(job, work, schema_of(pa.int64()), 1)
    mark = AccumulatorColumn("onceflow.kept", "last", pa.bool_())
    table = running.stores[0].accumulators("deduplicate", [pa.string()], [mark], ttl=work.ttl)
    assert table.expiry is not None
    table.expiry.clock = StateClock(lambda: now_s)
    record = {"key": "a", "at": 0, "id": 1}
    assert running.take([record]) == [record]
    for _ in range(3):
        now_s += 9
        assert running.take([record]) == [], "a record that is dropped renews the time"
    now_s += 11
    assert running.take([record]) == [record]


def test_a_record_without_a_place_in_the_order_fails_by_name(job: Job) -> None:
    work = Deduplicate(("key",), Keep.LAST, "at")
    running = run(job, work, schema_of(pa.int64()), 1)
    with pytest.raises(UserFunctionError, match=r"by='at'.*no value in this column.*'id': 7"):
        running.take([{"key": "a", "at": 1, "id": 6}, {"key": "a", "at": None, "id": 7}])
