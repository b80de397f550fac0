"""The queries of Nexmark, as a user writes them.

Where SQL updates a result, the stream has a record for each update. The last one of a key is the
result, as in a sink with upserts of the key; see expected.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pyarrow as pa

from onceflow import (
    EventTimeSessionWindows,
    Stream,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    avg,
    count,
    desc,
    max_,
    min_,
    sum_,
)

TEN_SECONDS = TumblingEventTimeWindows("10 s")
DAY = "to_char(date_time, '%Y-%m-%d')"
CHEAP, MIDDLE, DEAR = "price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000"


class Tables(NamedTuple):
    """The streams of events."""

    person: Stream
    auction: Stream
    bid: Stream


def q0(tables: Tables) -> Stream:
    """Pass: all bids."""
    return tables.bid.project("auction", "bidder", "price", "date_time", "extra")


def q1(tables: Tables) -> Stream:
    """Currency: prices in euros."""
    return tables.bid.project("auction", "bidder", "0.908 * price AS price", "date_time", "extra")


def q2(tables: Tables) -> Stream:
    """Selection: bids for some auctions."""
    return tables.bid.sql("SELECT auction, price FROM stream WHERE auction % 123 = 0")


def q3(tables: Tables) -> Stream:
    """Local items: auctions of a category whose sellers live in three states."""
    sellers = tables.person.sql("SELECT * FROM stream WHERE state IN ('OR', 'ID', 'CA')")
    auctions = tables.auction.sql("SELECT id, seller FROM stream WHERE category = 10")
    joined = auctions.key_by("seller").join(sellers.key_by("id"), ttl=None).merge(uid="q3")
    return joined.project("name", "city", "state", "id_left AS id")


def _valid_bids(tables: Tables, uid: str) -> Stream:
    """Return all auctions with each bid that came while they were open."""
    auctions, bids = tables.auction.key_by("id"), tables.bid.key_by("auction")
    pairs = auctions.interval_join(bids).between(0, "1 min").merge(uid=uid)
    return pairs.sql("SELECT * FROM stream WHERE date_time_right <= expires")


def q4(tables: Tables) -> Stream:
    """The average price for which auctions of a category end."""
    # Each auction is in one window: that of the moment at which it ends.
    ended = _valid_bids(tables, "q4-bids").key_by("id", "category")
    final = ended.window(TumblingEventTimeWindows("1 s"), time="expires")
    prices = final.aggregate(price=max_("price"), uid="q4-prices")
    averages = prices.key_by("category").running(average=avg("price"), auctions=count(), uid="q4")
    return averages.project("category", "average", "auctions")


def q7(tables: Tables) -> Stream:
    """The highest bids of each ten seconds."""
    windows = tables.bid.key_by(all="1").window(TEN_SECONDS)
    highest = windows.aggregate(price=max_("price"), uid="q7-highest").key_by("price")
    joined = tables.bid.key_by("price").interval_join(highest, right_time="window_end")
    bids = joined.between(0, "10 s", lower_inclusive=False).merge(uid="q7")
    return bids.project("auction", "price", "bidder", "date_time", "extra")


def q8(tables: Tables) -> Stream:
    """New users: persons who open an auction in the ten seconds in which they appear."""
    sellers = tables.auction.key_by("seller").window(TEN_SECONDS)
    windows = sellers.aggregate(auctions=count(), uid="q8-sellers").key_by("seller")
    joined = tables.person.key_by("id").interval_join(windows, right_time="window_end")
    new = joined.between(0, "10 s", lower_inclusive=False).merge(uid="q8")
    return new.project("id", "name", "window_start AS starttime")


def q9(tables: Tables) -> Stream:
    """The highest bid of each auction."""
    bids = _valid_bids(tables, "q9-bids").project(
        *("id", "item_name", "description", "initial_bid", "reserve", "date_time_left AS opened"),
        *("expires", "seller", "category", "extra_left AS extra", "auction", "bidder", "price"),
        *("date_time_right AS date_time", "extra_right AS bid_extra"),
    )
    return bids.key_by("id").top_n(1, by=[desc("price"), "date_time"], uid="q9")


def q10(tables: Tables) -> Stream:
    """Log: bids in files by day and minute."""
    return tables.bid.project(
        *("auction", "bidder", "price", "date_time", "extra"),
        *(f"{DAY} AS day", "to_char(date_time, '%H:%M') AS minute"),
    )


def q11(tables: Tables) -> Stream:
    """Sessions: how many bids a person makes without a pause of ten seconds."""
    sessions = tables.bid.key_by("bidder").window(EventTimeSessionWindows("10 s"))
    return sessions.aggregate(bids=count(), uid="q11")


def q12(tables: Tables) -> Stream:
    """Windows of the clock: how many bids a person makes in ten seconds."""
    windows = tables.bid.key_by("bidder").window(TumblingProcessingTimeWindows("10 s"))
    return windows.aggregate(bids=count(), uid="q12")


def q13(tables: Tables) -> Stream:
    """Side input: bids with a value of a table."""
    keys = range(10_000)
    table = pa.table({"key": pa.array(keys), "value": [f"value {key}" for key in keys]})
    bids = tables.bid.project("auction", "bidder", "price", "date_time", "auction % 10000 AS key")
    return bids.join(table, on="key").project("auction", "bidder", "price", "date_time", "value")


def count_letter_c(text: str) -> int:
    """Return the number of letters "c"."""
    return text.count("c")


def q14(tables: Tables) -> Stream:
    """Calculation: a function, the time of day and a filter."""
    return tables.bid.sql(
        """
        SELECT auction, bidder, 0.908 * price AS price,
            CASE WHEN date_part('hour', date_time) BETWEEN 8 AND 18 THEN 'dayTime'
                 WHEN date_part('hour', date_time) <= 6 OR date_part('hour', date_time) >= 20
                 THEN 'nightTime' ELSE 'otherTime' END AS bid_time_type,
            date_time, extra, count_letter_c(extra) AS c_counts
        FROM stream WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000
        """,
        functions={"count_letter_c": count_letter_c},
    )


def q17(tables: Tables) -> Stream:
    """Statistics of an auction and day."""
    return tables.bid.key_by("auction", day=DAY).running(
        total_bids=count(),
        rank1_bids=count(where=CHEAP),
        rank2_bids=count(where=MIDDLE),
        rank3_bids=count(where=DEAR),
        min_price=min_("price"),
        max_price=max_("price"),
        avg_price=avg("price"),
        sum_price=sum_("price"),
        uid="q17",
    )


def q18(tables: Tables) -> Stream:
    """The last bid of a person for an auction."""
    bids = tables.bid.key_by("bidder", "auction")
    return bids.deduplicate(keep="last", by="date_time", uid="q18")


def q19(tables: Tables) -> Stream:
    """The ten highest bids of an auction."""
    return tables.bid.key_by("auction").top_n(10, by=[desc("price"), "date_time"], uid="q19")


def q20(tables: Tables) -> Stream:
    """Bids with their auctions, of one category."""
    auctions = tables.auction.sql("SELECT * FROM stream WHERE category = 10").key_by("id")
    joined = tables.bid.key_by("auction").join(auctions, ttl=None).merge(uid="q20")
    return joined.project(
        *("auction", "bidder", "price", "channel", "url", "date_time_left AS date_time"),
        *("extra_left AS extra", "item_name", "description", "initial_bid", "reserve"),
        *("date_time_right AS opened", "expires", "seller", "category"),
        "extra_right AS auction_extra",
    )


def q21(tables: Tables) -> Stream:
    """The id of a bid's channel, by a regular expression."""
    return tables.bid.sql(
        """
        SELECT * FROM (
            SELECT auction, bidder, price, channel, CASE lower(channel)
                WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2'
                WHEN 'baidu' THEN '3' ELSE regexp_match(url, '(&|^)channel_id=([^&]*)')[2]
                END AS channel_id
            FROM stream
        ) WHERE channel_id IS NOT NULL
        """
    )


def q22(tables: Tables) -> Stream:
    """The directories of a bid's URL."""
    return tables.bid.project(
        *("auction", "bidder", "price", "channel"),
        *(f"split_part(url, '/', {part}) AS dir{part - 3}" for part in (4, 5, 6)),
    )


QUERIES: Mapping[str, Callable[[Tables], Stream]] = {
    query.__name__: query
    for query in (q0, q1, q2, q3, q4, q7, q8, q9, q10, q11, q13, q14, q17, q18, q19, q20, q21, q22)
}
"""All queries by name."""
