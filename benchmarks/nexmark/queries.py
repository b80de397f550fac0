"""The queries of Nexmark, as a user writes them.

Where SQL updates a result, the stream has a record for each update. The last one of a key is the
result, as in a sink with upserts of the key; see expected.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import pyarrow as pa

from onceflow import (
    EventTimeSessionWindows,
    SlidingEventTimeWindows,
    Stream,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    avg,
    count,
    count_distinct,
    desc,
    max_,
    min_,
    sum_,
)

SECOND = TumblingEventTimeWindows("1 s")
TEN_SECONDS = TumblingEventTimeWindows("10 s")
DAY = "to_char(date_time, '%Y-%m-%d')"
RANKS = {
    "total": None,
    "rank1": "price < 10000",
    "rank2": "price >= 10000 AND price < 1000000",
    "rank3": "price >= 1000000",
}


class Tables:
    """The streams of events. A stream that no query uses is not created."""

    def __init__(self, read: Callable[[str], Stream]) -> None:
        self._read = read

    @cached_property
    def person(self) -> Stream:
        """The persons."""
        return self._read("person")

    @cached_property
    def auction(self) -> Stream:
        """The auctions."""
        return self._read("auction")

    @cached_property
    def bid(self) -> Stream:
        """The bids."""
        return self._read("bid")


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
    joined = auctions.key_by("seller").join(sellers.key_by("id"), ttl=None)
    return joined.merge("name", "city", "state", "id_left AS id", uid="q3")


def _valid_bids(tables: Tables, *columns: str, uid: str) -> Stream:
    """Return columns of all auctions with each bid that came while they were open."""
    auctions, bids = tables.auction.key_by("id"), tables.bid.key_by("auction")
    return auctions.interval_join(bids).between(0, "expires").merge(*columns, uid=uid)


def _ended_auctions(tables: Tables, uid: str) -> Stream:
    """Return the highest bid of each auction, when the auction has ended."""
    bids = _valid_bids(tables, "id", "seller", "category", "expires", "price", uid=f"{uid}-bids")
    # Each auction is in one window, which ends after the auction.
    windows = bids.key_by("id", "seller", "category", "expires").window(SECOND, time="expires")
    return windows.aggregate(price=max_("price"), uid=f"{uid}-prices")


def q4(tables: Tables) -> Stream:
    """The average price for which auctions of a category end."""
    ended = _ended_auctions(tables, "q4").key_by("category")
    return ended.running(average=avg("price"), auctions=count(), uid="q4")


def q5(tables: Tables) -> Stream:
    """The auctions with the most bids in the last ten seconds, every two seconds."""
    windows = tables.bid.key_by("auction").window(SlidingEventTimeWindows("10 s", "2 s"))
    counts = windows.aggregate(bids=count(), uid="q5-counts")
    most = counts.per_window().aggregate(most=max_("bids"), uid="q5-most")
    return counts.connect(most).key_by("bids", "most").per_window().join().merge(uid="q5")


def q6(tables: Tables) -> Stream:
    """The average price of the last ten auctions of a seller."""
    ended = _ended_auctions(tables, "q6").key_by("seller").running(auctions=count(), uid="q6-count")
    last = ended.key_by("seller").over(
        rows=10, by=["expires", "id"], average=avg("price"), uid="q6"
    )
    return last.project("seller", "average", "auctions")


def q7(tables: Tables) -> Stream:
    """The highest bids of each ten seconds."""
    highest = tables.bid.window_all(TEN_SECONDS).aggregate(highest=max_("price"), uid="q7-highest")
    both = tables.bid.connect(highest).key_by("price", "highest")
    windows = both.window(TEN_SECONDS, left_time="date_time", right_time="window_start")
    return windows.join().merge("auction", "price", "bidder", "date_time", "extra", uid="q7")


def q8(tables: Tables) -> Stream:
    """New users: persons who open an auction in the ten seconds in which they appear."""
    sellers = tables.auction.key_by("seller").window(TEN_SECONDS)
    windows = sellers.aggregate(auctions=count(), uid="q8-sellers").key_by("seller")
    joined = tables.person.key_by("id").interval_join(windows, right_time="window_end")
    new = joined.between(0, "10 s", lower_inclusive=False)
    return new.merge("id", "name", "window_start AS starttime", uid="q8")


def q9(tables: Tables) -> Stream:
    """The highest bid of each auction."""
    bids = _valid_bids(
        tables,
        *("id", "item_name", "description", "initial_bid", "reserve", "date_time_left AS opened"),
        *("expires", "seller", "category", "extra_left AS extra", "bidder", "price"),
        *("date_time_right AS date_time", "extra_right AS bid_extra"),
        uid="q9-bids",
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


def _statistics_by_rank() -> Mapping[str, Any]:
    """Return how many bids, bidders and auctions there are: in all, and by rank of the price."""
    return {
        **{f"{rank}_bids": count(where=where) for rank, where in RANKS.items()},
        **{f"{rank}_bidders": count_distinct("bidder", where=w) for rank, w in RANKS.items()},
        **{f"{rank}_auctions": count_distinct("auction", where=w) for rank, w in RANKS.items()},
    }


def q15(tables: Tables) -> Stream:
    """Statistics of a day."""
    return tables.bid.key_by(day=DAY).running(**_statistics_by_rank(), uid="q15")


def q16(tables: Tables) -> Stream:
    """Statistics of a channel and day."""
    bids = tables.bid.key_by("channel", day=DAY)
    days = bids.running(last=max_("date_time"), **_statistics_by_rank(), uid="q16")
    return days.project("*", "to_char(last, '%H:%M') AS minute")


def q17(tables: Tables) -> Stream:
    """Statistics of an auction and day."""
    return tables.bid.key_by("auction", day=DAY).running(
        total_bids=count(),
        rank1_bids=count(where=RANKS["rank1"]),
        rank2_bids=count(where=RANKS["rank2"]),
        rank3_bids=count(where=RANKS["rank3"]),
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
    return (
        tables.bid.key_by("auction")
        .join(auctions, ttl=None)
        .merge(
            *("auction", "bidder", "price", "channel", "url", "date_time_left AS date_time"),
            *("extra_left AS extra", "item_name", "description", "initial_bid", "reserve"),
            *("date_time_right AS opened", "expires", "seller", "category"),
            "extra_right AS auction_extra",
            uid="q20",
        )
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
    for query in (
        q0,
        q1,
        q2,
        q3,
        q4,
        q5,
        q6,
        q7,
        q8,
        q9,
        q10,
        q11,
        q12,
        q13,
        q14,
        q15,
        q16,
        q17,
        q18,
        q19,
        q20,
        q21,
        q22,
    )
}
"""All queries by name."""
