from __future__ import annotations

import pickle
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.support.drawn_seeds import draw_random

from onceflow.core.errors import ConfigError, StateIncompatible
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import EndOfInput, ReaderContext, Split
from onceflow.sources import DatagenSource, NexmarkSource

CONTEXT = ReaderContext(job="j", uid="u", subtask=0, parallelism=1, attempt=AttemptId(1))


def read(source: NexmarkSource, polls_max: int = 1_000_000) -> dict[str, pa.Table]:
    """Return the rows of each table in the order of their times."""
    reader = source.reader(source.splits(), CONTEXT)
    batches: dict[str, list[pa.RecordBatch]] = {name: [] for name in source.outputs}
    for _ in range(polls_max):
        polled = reader.poll(1.0)
        if isinstance(polled, EndOfInput):
            break
        assert isinstance(polled, tuple)
        for part in polled:
            batches[part.output].append(part.rows)
    tables = {
        name: pa.Table.from_batches(rows, source.outputs[name]) for name, rows in batches.items()
    }
    return {name: rows.sort_by("date_time") for name, rows in tables.items()}


def take_row(table: pa.Table, index: int) -> dict[str, Any]:
    """Return a row without its long texts."""
    row = table.to_pylist()[index]
    return {name: value for name, value in row.items() if name not in ("description", "extra")}


def mean_of(values: Any) -> float:
    return float(np.asarray(values, np.float64).mean())


@pytest.fixture(scope="module")
def tables() -> dict[str, pa.Table]:
    # One event each millisecond, so that times tell the number of an event.
    return read(NexmarkSource(events=100_000, event_interval_us=1_000))


def test_of_fifty_events_one_is_a_person_and_three_are_auctions(
    tables: dict[str, pa.Table],
) -> None:
    assert {name: rows.num_rows for name, rows in tables.items()} == {
        "person": 2_000,
        "auction": 6_000,
        "bid": 92_000,
    }
    some = read(NexmarkSource(events=53))
    assert [rows.num_rows for rows in some.values()] == [2, 5, 46]


def test_an_event_is_the_same_in_every_split_and_batch() -> None:
    whole = read(NexmarkSource(events=1_234, seed=3, event_interval_us=1_000))
    split = NexmarkSource(
        events=1_234, seed=3, event_interval_us=1_000, splits_count=3, batch_events=17
    )
    assert read(pickle.loads(pickle.dumps(split))) == whole
    assert read(NexmarkSource(events=1_234, seed=4, event_interval_us=1_000)) != whole


def test_values_never_change(tables: dict[str, pa.Table]) -> None:
    """A checkpoint of an older version is replayed with the same values."""
    sums = [
        pc.sum(tables[name][column]).as_py()
        for name, column in (
            ("bid", "auction"),
            ("bid", "bidder"),
            ("bid", "price"),
            ("auction", "initial_bid"),
            ("auction", "reserve"),
            ("auction", "seller"),
        )
    ]
    assert sums == [
        363_727_800,
        172_086_430,
        672_782_468_075,
        44_430_883_709,
        87_803_444_350,
        11_220_271,
    ]
    bid = take_row(tables["bid"], 50_000)
    assert bid == {
        "auction": 4_200,
        "bidder": 2_001,
        "price": 3_777,
        "channel": "Baidu",
        "url": "https://www.nexmark.com/jqtbg/uqnu/pdbvj/item.htm?query=1",
        "date_time": datetime(2015, 7, 15, 0, 0, 54, 348_000),
    }
    auction = take_row(tables["auction"], 5_000)
    assert auction == {
        "id": 6_000,
        "item_name": "oytifnapnloxeonblf",
        "initial_bid": 3_789,
        "reserve": 64_476_638,
        "date_time": datetime(2015, 7, 15, 0, 1, 23, 303_000),
        "expires": datetime(2015, 7, 15, 0, 1, 24, 29_000),
        "seller": 2_600,
        "category": 11,
    }
    person = take_row(tables["person"], 1_500)
    assert person == {
        "id": 2_500,
        "name": "Edsger Hopper",
        "email_address": "sfiimam@zgqvb",
        "credit_card": "9186 5171 1949 0559",
        "city": "Tacoma",
        "state": "WA",
        "date_time": datetime(2015, 7, 15, 0, 1, 15),
    }


def test_values_have_the_distributions_of_the_benchmark(tables: dict[str, pa.Table]) -> None:
    person, auction, bid = (tables[name] for name in ("person", "auction", "bid"))
    assert person["id"].to_pylist() == list(range(1_000, 3_000))
    assert auction["id"].to_pylist() == list(range(1_000, 7_000))
    assert set(auction["category"].to_pylist()) == {10, 11, 12, 13, 14}
    assert {"OR", "ID", "CA"} < set(person["state"].to_pylist())
    hot_auctions = mean_of(bid["auction"].to_numpy() % 100 == 0)
    hot_bidders = mean_of(bid["bidder"].to_numpy() % 100 == 1)
    assert 0.49 < hot_auctions < 0.53
    assert 0.74 < hot_bidders < 0.77
    hot_channels = pc.is_in(bid["channel"], pa.array(["Google", "Facebook", "Baidu", "Apple"]))
    assert 0.49 < mean_of(hot_channels.to_numpy()) < 0.51
    prices = np.log10(bid["price"].to_numpy())
    assert 2 <= prices.min() < 2.1
    assert 7.9 < prices.max() <= 8
    assert abs(mean_of(prices) - 5) < 0.02


def test_bids_and_auctions_name_what_is_open(tables: dict[str, pa.Table]) -> None:
    person, auction, bid = (tables[name] for name in ("person", "auction", "bid"))
    first_ms = person["date_time"][0].cast(pa.int64()).as_py()
    epochs = (bid["date_time"].cast(pa.int64()).to_numpy() - first_ms) // 50
    last_auctions = 1_000 + 3 * epochs + 2
    behind = last_auctions - bid["auction"].to_numpy()
    assert behind.min() >= -10
    assert behind.max() <= 100
    last_persons = 1_000 + epochs
    assert (last_persons - bid["bidder"].to_numpy()).max() <= 1_000
    open_ms = pc.subtract(auction["expires"], auction["date_time"]).cast(pa.int64()).to_numpy()
    # The time of a hundred auctions is 1,666 ms.
    assert open_ms.min() >= 1
    assert open_ms.max() <= 2 * 1_666
    assert abs(mean_of(open_ms) - 1_666) < 50


def test_a_reader_goes_on_exactly_where_a_snapshot_was_taken() -> None:
    source = NexmarkSource(events=2_000, splits_count=2, batch_events=7, event_interval_us=1_000)
    expected = read(source)
    rng = draw_random()
    reader = source.reader(source.splits(), CONTEXT)
    before: dict[str, list[pa.RecordBatch]] = {name: [] for name in source.outputs}
    for _ in range(rng.randrange(1, 250)):
        polled = reader.poll(1.0)
        assert isinstance(polled, tuple)
        for part in polled:
            before[part.output].append(part.rows)
    rest = source.reader(reader.snapshot(), CONTEXT)
    while isinstance(polled := rest.poll(1.0), tuple):
        for part in polled:
            before[part.output].append(part.rows)
    for name, rows in before.items():
        read_rows = pa.Table.from_batches(rows, source.outputs[name]).sort_by("date_time")
        assert read_rows == expected[name]


def test_an_endless_source_has_no_end() -> None:
    source = NexmarkSource(events=None)
    assert not source.bounded
    assert source.latest_offsets(source.splits()) == ()
    assert read(source, polls_max=3)["bid"].num_rows == 3 * 18_400


@pytest.mark.parametrize(
    "settings",
    [
        {"events": -1},
        {"splits_count": 0},
        {"event_interval_us": 0},
        {"batch_events": 0},
        {"events_per_second": 0},
    ],
)
def test_wrong_setting_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        NexmarkSource(**settings)


def test_split_of_another_source_is_refused() -> None:
    with pytest.raises(StateIncompatible, match="another source"):
        NexmarkSource().reader(DatagenSource().splits(), CONTEXT)
    with pytest.raises(StateIncompatible, match="another source"):
        NexmarkSource().reader([Split("nexmark-0", b"12")], CONTEXT)
