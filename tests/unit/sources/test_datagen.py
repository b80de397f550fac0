from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.support.drawn_seeds import draw_random

from onceflow.core.errors import ConfigError, StateIncompatible
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import EndOfInput, ReaderContext, Source, SourceReader, Split
from onceflow.sources import DatagenSource, NexmarkSource

CONTEXT = ReaderContext(job="j", uid="u", subtask=0, parallelism=1, attempt=AttemptId(1))


def _all(reader: SourceReader) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while not isinstance(batch := reader.poll(1.0), EndOfInput):
        if isinstance(batch, pa.RecordBatch):
            rows += batch.to_pylist()
    return rows


def _batch(reader: SourceReader) -> pa.RecordBatch:
    batch = reader.poll(0)
    if not isinstance(batch, pa.RecordBatch):
        raise AssertionError(f"{batch} instead of rows")
    return batch


def _by_id(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["id"])


def test_same_seed_gives_the_same_rows_whatever_the_splits_and_batches() -> None:
    one = DatagenSource(rows=1003, seed=7, accounts=50)
    three = DatagenSource(rows=1003, seed=7, accounts=50, splits_count=3, batch_rows=17)
    rows = _all(one.reader(one.splits(), CONTEXT))
    assert [row["id"] for row in rows] == list(range(1003))
    assert _by_id(_all(three.reader(three.splits(), CONTEXT))) == rows
    other = DatagenSource(rows=1003, seed=8, accounts=50)
    assert _all(other.reader(other.splits(), CONTEXT)) != rows
    assert {row["account"] for row in rows} == {f"acct-{index:06d}" for index in range(50)}
    assert all(-5000 <= row["amount"] < 95_000 for row in rows)


def test_reader_goes_on_exactly_where_a_snapshot_was_taken() -> None:
    source = pickle.loads(pickle.dumps(DatagenSource(rows=500, splits_count=4, batch_rows=7)))
    expected = _by_id(_all(source.reader(source.splits(), CONTEXT)))
    rng = draw_random()
    for _ in range(5):
        reader = source.reader(source.splits(), CONTEXT)
        before: list[dict[str, Any]] = []
        for _ in range(rng.randrange(60)):
            before += _batch(reader).to_pylist()
        taken = list(reader.snapshot())
        # Rescaled: the splits go to two readers.
        rest = [
            row for half in (taken[:1], taken[1:]) for row in _all(source.reader(half, CONTEXT))
        ]
        assert _by_id(before + rest) == expected


def test_accounts_and_amounts_are_spread_evenly() -> None:
    source = DatagenSource(rows=200_000, accounts=10, batch_rows=200_000)
    batch = _batch(source.reader(source.splits(), CONTEXT))
    counts = batch.column("account").value_counts().field("counts").to_numpy()
    assert len(counts) == 10
    assert np.all(np.abs(counts - 20_000) < 1000)
    amounts = batch.column("amount").to_numpy()
    assert abs(float(amounts.mean()) - 45_000) < 500


def test_endless_source_never_ends_and_numbers_go_on() -> None:
    source = DatagenSource(rows=None, splits_count=2)
    assert not source.bounded
    split = Split(
        "datagen-1", json.dumps({"split": 1, "of": 2, "next": 10**12, "stop": None}).encode()
    )
    batch = _batch(source.reader([split], CONTEXT))
    assert batch.column("id")[0].as_py() == 2 * 10**12 + 1


def test_rate_bounds_the_rows_and_a_poll_returns_in_time() -> None:
    source = DatagenSource(rows=None, rows_per_second=1000)
    started = time.monotonic()
    reader = source.reader(source.splits(), CONTEXT)
    count = 0
    while not count or time.monotonic() - started < 0.5:
        assert time.monotonic() - started < 60
        batch = reader.poll(0.01)
        assert not isinstance(batch, EndOfInput)
        count += batch.num_rows if isinstance(batch, pa.RecordBatch) else 0
    assert count <= (time.monotonic() - started) * 1000 + 1
    slow = DatagenSource(rows=None, rows_per_second=0.001)
    started = time.monotonic()
    assert slow.reader(slow.splits(), CONTEXT).poll(0.05) is None
    assert time.monotonic() - started < 60.0


def test_reader_without_splits_ends_when_bounded_and_waits_when_not() -> None:
    assert isinstance(DatagenSource(rows=5).reader([], CONTEXT).poll(0), EndOfInput)
    reader = DatagenSource(rows=None).reader([], CONTEXT)
    assert reader.poll(0.01) is None
    reader.close()
    reader.close()


def test_rows_fewer_than_splits_leave_splits_empty() -> None:
    source = DatagenSource(rows=2, splits_count=5)
    assert [row["id"] for row in _all(source.reader(source.splits(), CONTEXT))] == [0, 1]
    none = DatagenSource(rows=0, splits_count=2)
    assert _all(none.reader(none.splits(), CONTEXT)) == []


@pytest.mark.parametrize(
    "settings",
    [{"rows": -1}, {"splits_count": 0}, {"accounts": 0}, {"batch_rows": 0}, {"rows_per_second": 0}],
)
def test_wrong_setting_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        DatagenSource(**settings)


def test_split_of_another_source_is_refused() -> None:
    with pytest.raises(StateIncompatible, match="another source"):
        DatagenSource().reader([Split("payments-0", b'{"topic":"payments"}')], CONTEXT)


@pytest.mark.parametrize("kind", [DatagenSource, NexmarkSource])
def test_other_splits_count_is_refused_with_both_numbers(
    kind: type[DatagenSource] | type[NexmarkSource],
) -> None:
    two = kind(splits_count=2)
    known = two.splits()
    for count in (1, 3):
        for use in (kind(splits_count=count).discover, _reader_of(kind(splits_count=count))):
            with pytest.raises(StateIncompatible, match=rf"one of 2.*={count}: .*splits_count=2;"):
                use(known)
    assert two.discover(known) == known


def _reader_of(source: Source) -> Callable[[Sequence[Split]], object]:
    return lambda splits: source.reader(splits, CONTEXT)


def test_a_reader_tells_which_of_its_splits_have_ended() -> None:
    source = DatagenSource(rows=5, splits_count=2, batch_rows=3)
    reader = source.reader(source.splits(), CONTEXT)
    ended: list[list[str]] = []
    while not isinstance(reader.poll(0.1), EndOfInput):
        ended.append(list(reader.list_ended_splits()))
    first, second = (split.id for split in source.splits())
    assert ended == [[first], [first, second]]
