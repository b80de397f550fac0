"""A ledger of decimals is exact through kills of slots."""

from __future__ import annotations

from collections import defaultdict
from decimal import ROUND_HALF_UP, Context, Decimal, localcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource, amount_of
from tests.support.directory_sink import DirectorySink
from tests.support.held_up import kill_a_slot
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    EventTimeSessionWindows,
    FixedDelay,
    HeapBackend,
    JobState,
    Pipeline,
    RocksDBBackend,
    SlidingEventTimeWindows,
    StateBackend,
    WatermarkStrategy,
    avg,
    max_,
    min_,
    sum_,
)

SCALE = Decimal("123456789012345678901.07")
"""With it a record's money has more than 64 bits."""
AGGREGATES: dict[str, Any] = {
    "total": sum_("money"),
    "low": min_("money"),
    "high": max_("money"),
    "mean": avg("money"),
}


def money_of(record: int) -> Decimal:
    return SCALE * (amount_of(record) - 7)


def with_money(batch: pa.RecordBatch) -> pa.RecordBatch:
    money = [money_of(record) for record in batch.column("id").to_pylist()]
    return batch.append_column("money", pa.array(money, pa.decimal128(30, 2)))


def expected_of(values: list[Decimal]) -> tuple[Decimal, ...]:
    with localcontext(Context(prec=100)):
        total = sum(values, Decimal(0))
        mean = (total / len(values)).quantize(Decimal("0.000001"), ROUND_HALF_UP)
    return total, min(values), max(values), mean


def row_of(row: dict[str, Any]) -> tuple[Decimal, ...]:
    return tuple(row[name] for name in AGGREGATES)


@pytest.mark.parametrize("backend", [HeapBackend(), RocksDBBackend()], ids=["heap", "rocksdb"])
def test_money_is_added_exactly_though_slots_are_killed(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    source = CountingSource(
        3_000, splits_count=2, pause_s=0.005, ends_with=str(tmp_path / "killed")
    )
    balances = DirectorySink(str(tmp_path / "balances"))
    windows = DirectorySink(str(tmp_path / "windows"))
    sessions = DirectorySink(str(tmp_path / "sessions"))
    pipeline = Pipeline(
        cluster,
        name="money",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
        state_backend=backend,
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )
    strategy = WatermarkStrategy("id", max_out_of_orderness=0.002)
    records = pipeline.read(source, uid="records", watermarks=strategy)
    schema = source.schema.append(pa.field("money", pa.decimal128(30, 2)))
    keyed = records.map_batches(with_money, schema=schema, uid="money").key_by("account")
    keyed.running(**AGGREGATES, uid="balances").write(balances, uid="out")
    sliding = keyed.window(SlidingEventTimeWindows(0.6, 0.2))
    sliding.aggregate(**AGGREGATES, uid="windowed").write(windows, uid="windows")
    bursts = keyed.window(EventTimeSessionWindows(0.15))
    bursts.aggregate(**AGGREGATES, uid="bursts").write(sessions, uid="sessions")
    job = pipeline.start()
    job.wait_for(checkpoints=2)
    kill_a_slot(job, 0)
    (tmp_path / "killed").touch()
    assert job.wait(90).state is JobState.FINISHED

    rows = sorted(balances.rows(), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(source.records))
    by_account: dict[str, list[Decimal]] = defaultdict(list)
    for row in rows:
        assert row["money"] == money_of(row["id"])
        by_account[row["account"]].append(row["money"])
        assert row_of(row) == expected_of(by_account[row["account"]])
    last_ones = [(row["account"], row_of(row)) for row in sessions.rows()]
    assert len(last_ones) == source.accounts
    assert dict(last_ones) == {key: expected_of(values) for key, values in by_account.items()}
    by_window: dict[tuple[str, int], list[Decimal]] = defaultdict(list)
    for record in range(source.records):
        for start in range(record - record % 200, record - 600, -200):
            by_window[str(record % source.accounts), start].append(money_of(record))
    found = [
        ((row["account"], round(row["window_start"].timestamp() * 1000)), row_of(row))
        for row in windows.rows()
    ]
    assert len(found) == len(by_window)
    assert dict(found) == {key: expected_of(values) for key, values in by_window.items()}
