"""The persons, auctions and bids of Nexmark as functions of the numbers of their events.

Of 50 events in a row, the first is a person, the next three are auctions, and the others are bids.
So event n belongs to epoch n // 50. Ids of persons and auctions count up from 1000:

event n            epoch e, offset o      id
person             o = 0                  1000 + e
auction            o = 1, 2, 3            1000 + 3 e + o - 1
bid                o = 4 … 49             (none)

A value is computed with integers from the event's number and the seed. So it is the same on every
machine, in every batch and in every run. Distributions are those of the standard generator: half of
the bids are for the hot auction and half have a hot channel; three of four bids are from the hot
bidder, and three of four auctions are from the hot seller. Auctions are open for a time in which
about 100 of them are open at once. Prices are distributed evenly by their logarithm.

Source: the benchmark's description and the settings of its generator, github.com/nexmark/nexmark.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.sources.datagen.numbered_records import Words, mix_bits, mix_numbers

Numbers: TypeAlias = npt.NDArray[np.int64]

EPOCH_EVENTS: Final = 50
"""The number of events after which the kinds of events repeat."""

_TIME: Final = pa.timestamp("ms")


def _schema(columns: Sequence[tuple[str, pa.DataType]]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])


TABLES: Final = {
    "person": _schema(
        [
            ("id", pa.int64()),
            ("name", pa.string()),
            ("email_address", pa.string()),
            ("credit_card", pa.string()),
            ("city", pa.string()),
            ("state", pa.string()),
            ("date_time", _TIME),
            ("extra", pa.string()),
        ]
    ),
    "auction": _schema(
        [
            ("id", pa.int64()),
            ("item_name", pa.string()),
            ("description", pa.string()),
            ("initial_bid", pa.int64()),
            ("reserve", pa.int64()),
            ("date_time", _TIME),
            ("expires", _TIME),
            ("seller", pa.int64()),
            ("category", pa.int64()),
            ("extra", pa.string()),
        ]
    ),
    "bid": _schema(
        [
            ("auction", pa.int64()),
            ("bidder", pa.int64()),
            ("price", pa.int64()),
            ("channel", pa.string()),
            ("url", pa.string()),
            ("date_time", _TIME),
            ("extra", pa.string()),
        ]
    ),
}
"""The schema of each table."""

_FIRST_ID: Final = 1_000
_FIRST_CATEGORY: Final = 10
_CATEGORIES: Final = 5
_FIRST_TIME_MS: Final = 1_436_918_400_000
"""2015-07-15 00:00 UTC."""
_HOT_STEP: Final = 100
"""The hot auction, bidder and seller change after this number of auctions or persons."""
_AUCTIONS_OPEN: Final = 100
_PERSONS_ACTIVE: Final = 1_000
_LEAD: Final = 10
"""The number of ids that events may name before the person or auction appears."""
_CHANNELS: Final = 10_000
_HOT_CHANNELS: Final = ("Google", "Facebook", "Baidu", "Apple")
_CITIES: Final = (
    *("Tucson", "Oakland", "San Diego", "Nampa", "Salem"),
    *("Eugene", "Spokane", "Tacoma", "Everett", "Laramie"),
)
_STATES: Final = ("AZ", "CA", "ID", "OR", "WA", "WY")
_FIRST_NAMES: Final = ("Ada", "Alan", "Barbara", "Donald", "Edsger", "Frances", "Grace", "Leslie")
_LAST_NAMES: Final = ("Allen", "Dijkstra", "Hopper", "Knuth", "Lamport", "Liskov", "Turing")
_TEXTS: Final = 1_024
"""The number of different texts of each text column."""
_PRICE_STEPS: Final = 600


class NexmarkTables:
    """A generator of the rows of all tables from the numbers of their events."""

    def __init__(self, *, seed: int, interval_us: int) -> None:
        """`interval_us` is the event time between two events, in microseconds."""
        self._seed = seed
        self._interval_us = interval_us

    def persons(self, numbers: Numbers) -> pa.RecordBatch:
        """Return the persons of the events `numbers`, which are events of persons."""
        words = mix_numbers(numbers, self._seed)
        cards = mix_bits(words)
        columns = [
            pa.array(numbers // EPOCH_EVENTS + _FIRST_ID),
            pc.binary_join_element_wise(
                _pick(_FIRST_NAMES, words), _pick(_LAST_NAMES, words >> np.uint64(8)), " "
            ),
            pc.binary_join_element_wise(
                _texts(7, 7).take(_below(words >> np.uint64(16), _TEXTS)),
                _texts(5, 5).take(_below(words >> np.uint64(26), _TEXTS)),
                "@",
            ),
            pc.binary_join_element_wise(*(_digits(cards, part) for part in range(4)), " "),
            _pick(_CITIES, words >> np.uint64(36)),
            _pick(_STATES, words >> np.uint64(44)),
            self._times(self._times_ms(numbers)),
            _texts(80, 120).take(_below(words >> np.uint64(52), _TEXTS)),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=TABLES["person"])

    def auctions(self, numbers: Numbers) -> pa.RecordBatch:
        """Return the auctions of the events `numbers`, which are events of auctions."""
        words = mix_numbers(numbers, self._seed)
        prices = mix_bits(words)
        lengths = mix_bits(prices)
        initial = _prices(prices)
        times_ms = self._times_ms(numbers)
        columns = [
            pa.array(_last_auction(numbers) + _FIRST_ID),
            _texts(10, 20).take(_below(words >> np.uint64(20), _TEXTS)),
            _texts(50, 100).take(_below(words >> np.uint64(30), _TEXTS)),
            pa.array(initial),
            pa.array(initial + _prices(prices >> np.uint64(32))),
            self._times(times_ms),
            self._times(times_ms + 1 + _remainder(lengths, self._length_ms_max())),
            pa.array(_sellers(numbers, words, lengths >> np.uint64(32)) + _FIRST_ID),
            pa.array(_remainder(words >> np.uint64(4), _CATEGORIES) + _FIRST_CATEGORY),
            _texts(240, 360).take(_below(words >> np.uint64(40), _TEXTS)),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=TABLES["auction"])

    def bids(self, numbers: Numbers) -> pa.RecordBatch:
        """Return the bids of the events `numbers`, which are events of bids."""
        words = mix_numbers(numbers, self._seed)
        others = mix_bits(words)
        channels = _channel_numbers(words)
        columns = [
            pa.array(_auctions_of_bids(numbers, words, others) + _FIRST_ID),
            pa.array(_bidders(numbers, words, others >> np.uint64(16)) + _FIRST_ID),
            pa.array(_prices(others >> np.uint64(32))),
            _channel_names().take(channels),
            _channel_urls().take(channels),
            self._times(self._times_ms(numbers)),
            _texts(54, 82).take(_below(words >> np.uint64(48), _TEXTS)),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=TABLES["bid"])

    def _times_ms(self, numbers: Numbers) -> Numbers:
        return numbers * self._interval_us // 1_000 + _FIRST_TIME_MS

    def _times(self, times_ms: Numbers) -> pa.Array:
        return pa.array(times_ms).view(_TIME)

    def _length_ms_max(self) -> int:
        """Return the longest time that an auction is open: twice the time of 100 auctions."""
        events = _AUCTIONS_OPEN * EPOCH_EVENTS // 3
        return max(2 * (events * self._interval_us // 1_000), 1)


def _last_auction(numbers: Numbers) -> Numbers:
    """Return the number of the last auction up to each event, which is no event of a person."""
    return numbers // EPOCH_EVENTS * 3 + np.minimum(numbers % EPOCH_EVENTS, 3) - 1


def _auctions_of_bids(numbers: Numbers, hot: Words, choice: Words) -> Numbers:
    """Return the auction of each bid: the hot one, or one of the last 100 and the next 10."""
    last = _last_auction(numbers)
    oldest = np.maximum(last - _AUCTIONS_OPEN, 0)
    others = oldest + _remainder(choice, last - oldest + 1 + _LEAD)
    return np.where(hot & np.uint64(1), last // _HOT_STEP * _HOT_STEP, others)


def _bidders(numbers: Numbers, hot: Words, choice: Words) -> Numbers:
    last = numbers // EPOCH_EVENTS
    bidders = last // _HOT_STEP * _HOT_STEP + 1
    return np.where(hot & np.uint64(6), bidders, _active_persons(last, choice))


def _sellers(numbers: Numbers, hot: Words, choice: Words) -> Numbers:
    last = numbers // EPOCH_EVENTS
    return np.where(
        hot & np.uint64(3), last // _HOT_STEP * _HOT_STEP, _active_persons(last, choice)
    )


def _active_persons(last: Numbers, choice: Words) -> Numbers:
    """Return one of the last 1000 persons and of the next 10."""
    active = np.minimum(last + 1, _PERSONS_ACTIVE)
    return last + 1 - active + _remainder(choice, active + _LEAD)


def _channel_numbers(words: Words) -> pa.Array:
    """Return a hot channel (0 to 3) for every second word, and another one for the others."""
    hot = _remainder(words >> np.uint64(4), len(_HOT_CHANNELS))
    other = _remainder(words >> np.uint64(6), _CHANNELS) + len(_HOT_CHANNELS)
    return pa.array(np.where(words & np.uint64(8), hot, other))


def _prices(words: Words) -> Numbers:
    """Return a price for the lowest 32 bits of each word: 100 to 100,000,000."""
    table = _price_table()
    steps = _remainder((words & np.uint64(0xFFFF_FFFF)) >> np.uint64(12), _PRICE_STEPS)
    within = (words & np.uint64(0xFFF)).view(np.int64)
    return table[steps] + ((table[steps + 1] - table[steps]) * within >> 12)


@cache
def _price_table() -> Numbers:
    """Return 100 · 10^(6 i / 600) for i from 0 to 600. Decimal has the same digits everywhere."""
    exponents = (Decimal(6 * step) / _PRICE_STEPS for step in range(_PRICE_STEPS + 1))
    return np.array([round(100 * Decimal(10) ** exponent) for exponent in exponents], np.int64)


@cache
def _texts(length_min: int, length_max: int) -> pa.StringArray:
    """Return 1024 texts of small letters. The lengths from the least to the greatest alternate."""
    lengths = [length_min + i % (length_max - length_min + 1) for i in range(_TEXTS)]
    seed = length_min << 16 | length_max
    words = mix_numbers(np.arange(sum(lengths), dtype=np.int64), seed)
    letters = (_remainder(words, 26) + ord("a")).astype(np.uint8).tobytes().decode()
    ends = np.cumsum(lengths)
    return pa.array(
        [letters[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    )


@cache
def _channel_names() -> pa.StringArray:
    return pa.array([*_HOT_CHANNELS, *(f"channel-{number}" for number in range(_CHANNELS))])


@cache
def _channel_urls() -> pa.StringArray:
    """Return the URL of each channel. Hot channels have no id in it, and one of ten others."""
    parts = _texts(3, 5).to_pylist()
    urls: list[str] = []
    for number in range(len(_HOT_CHANNELS) + _CHANNELS):
        path = "/".join(parts[(number * step + number // _TEXTS) % _TEXTS] for step in (7, 11, 13))
        url = f"https://www.nexmark.com/{path}/item.htm?query=1"
        has_id = number >= len(_HOT_CHANNELS) and number % 10
        # An odd factor: each number gets an id of its own.
        urls.append(f"{url}&channel_id={number * 2_654_435_761 % 2**31}" if has_id else url)
    return pa.array(urls)


def _digits(words: Words, part: int) -> pa.Array:
    """Return four digits of each word."""
    numbers = _remainder((words >> np.uint64(16 * part)) & np.uint64(0xFFFF), 10_000)
    texts: pa.Array = pc.utf8_lpad(pa.array(numbers).cast(pa.string()), 4, "0")
    return texts


def _pick(values: Sequence[str], words: Words) -> pa.Array:
    return pa.array(values, pa.string()).take(_below(words, len(values)))


def _below(words: Words, bound: int) -> pa.Array:
    return pa.array(_remainder(words, bound))


def _remainder(words: Words, bound: int | Numbers) -> Numbers:
    """Return a number from 0 to below `bound` for each word."""
    divisor = np.uint64(bound) if isinstance(bound, int) else bound.view(np.uint64)
    return (words % divisor).view(np.int64)
