"""The queries of Nexmark in the SQL of Flink: those of github.com/nexmark/nexmark for our columns.

Flink SQL has no average of the last rows of a key that changes, so q6 is left out. A column that
DuckDB's result has too has the name that it has there.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from benchmarks.nexmark.topic import EVENT_TYPES, RECORDS, Topic

_DAY = "DATE_FORMAT(date_time, 'yyyy-MM-dd')"
_HOP = (
    "TABLE(HOP(TABLE bid, DESCRIPTOR(date_time), INTERVAL '2' SECOND, INTERVAL '10' SECOND))"
    " GROUP BY auction, window_start, window_end"
)
_RANKS = {
    "total": "",
    "rank1": " FILTER (WHERE price < 10000)",
    "rank2": " FILTER (WHERE price >= 10000 AND price < 1000000)",
    "rank3": " FILTER (WHERE price >= 1000000)",
}


def _by_rank(count: str, name: str) -> str:
    """Return a count of all bids and of those of each rank."""
    return ", ".join(f"{count}{where} AS {rank}_{name}" for rank, where in _RANKS.items())


_BIDS = _by_rank("count(*)", "bids")
_BIDDERS = _by_rank("count(DISTINCT bidder)", "bidders")
_AUCTIONS = _by_rank("count(DISTINCT auction)", "auctions")
_CHANNEL_ID = r"REGEXP_EXTRACT(url, '(&|^)channel_id=([^&]*)', 2)"


def _to_time(milliseconds: str) -> str:
    return f"CAST(TO_TIMESTAMP_LTZ({milliseconds}, 3) AS TIMESTAMP(3))"


_COLUMNS = {
    "person": "id, name, email_address, credit_card, city, state, event_time AS date_time, extra",
    "auction": "id, item_name, description, initial_bid, reserve, event_time AS date_time,"
    f" {_to_time('expires')} AS expires, seller, category, extra",
    "bid": "auction, bidder, price, channel, url, event_time AS date_time, extra",
}

FLINK_QUERIES: Mapping[str, str] = {
    "q0": "SELECT auction, bidder, price, date_time, extra FROM bid",
    "q1": "SELECT auction, bidder, 0.908 * price AS price, date_time, extra FROM bid",
    "q2": "SELECT auction, price FROM bid WHERE MOD(auction, 123) = 0",
    "q3": """
        SELECT p.name, p.city, p.state, a.id FROM auction a JOIN person p ON a.seller = p.id
        WHERE a.category = 10 AND (p.state = 'OR' OR p.state = 'ID' OR p.state = 'CA')
    """,
    "q4": """
        SELECT category, AVG(price) AS average FROM (
            SELECT MAX(b.price) AS price, a.category FROM auction a, bid b
            WHERE a.id = b.auction AND b.date_time BETWEEN a.date_time AND a.expires
            GROUP BY a.id, a.category
        ) GROUP BY category
    """,
    "q5": f"""
        SELECT counts.auction, counts.bids FROM (
            SELECT auction, count(*) AS bids, window_start AS starts, window_end AS ends FROM {_HOP}
        ) counts JOIN (
            SELECT max(bids) AS bids, starts, ends FROM (
                SELECT count(*) AS bids, window_start AS starts, window_end AS ends FROM {_HOP}
            ) GROUP BY starts, ends
        ) most
        ON counts.starts = most.starts AND counts.ends = most.ends AND counts.bids >= most.bids
    """,
    "q7": """
        SELECT b.auction, b.price, b.bidder, b.date_time, b.extra FROM bid b JOIN (
            SELECT MAX(price) AS price, window_end AS ends
            FROM TABLE(TUMBLE(TABLE bid, DESCRIPTOR(date_time), INTERVAL '10' SECOND))
            GROUP BY window_start, window_end
        ) highest ON b.price = highest.price
        WHERE b.date_time BETWEEN highest.ends - INTERVAL '10' SECOND AND highest.ends
    """,
    "q8": """
        SELECT p.id, p.name, p.starts AS starttime FROM (
            SELECT id, name, window_start AS starts, window_end AS ends
            FROM TABLE(TUMBLE(TABLE person, DESCRIPTOR(date_time), INTERVAL '10' SECOND))
            GROUP BY id, name, window_start, window_end
        ) p JOIN (
            SELECT seller, window_start AS starts, window_end AS ends
            FROM TABLE(TUMBLE(TABLE auction, DESCRIPTOR(date_time), INTERVAL '10' SECOND))
            GROUP BY seller, window_start, window_end
        ) a ON p.id = a.seller AND p.starts = a.starts AND p.ends = a.ends
    """,
    "q9": """
        SELECT id, item_name, description, initial_bid, reserve, date_time AS opened, expires,
            seller, category, extra, bidder, price, bid_time AS date_time, bid_extra
        FROM (
            SELECT a.*, b.auction, b.bidder, b.price, b.date_time AS bid_time,
                b.extra AS bid_extra, ROW_NUMBER() OVER (
                    PARTITION BY a.id ORDER BY b.price DESC, b.date_time ASC
                ) AS place
            FROM auction a, bid b
            WHERE a.id = b.auction AND b.date_time BETWEEN a.date_time AND a.expires
        ) WHERE place <= 1
    """,
    "q10": f"""
        SELECT auction, bidder, price, date_time, extra, {_DAY} AS `day`,
            DATE_FORMAT(date_time, 'HH:mm') AS `minute`
        FROM bid
    """,
    "q11": """
        SELECT bidder, count(*) AS bids, SESSION_START(date_time, INTERVAL '10' SECOND)
            AS window_start, SESSION_END(date_time, INTERVAL '10' SECOND) AS window_end
        FROM bid GROUP BY bidder, SESSION(date_time, INTERVAL '10' SECOND)
    """,
    "q12": """
        SELECT bidder, count(*) AS bids, window_start, window_end
        FROM TABLE(TUMBLE(TABLE clocked_bid, DESCRIPTOR(proc_time), INTERVAL '10' SECOND))
        GROUP BY bidder, window_start, window_end
    """,
    "q13": """
        SELECT b.auction, b.bidder, b.price, b.date_time, s.`value`
        FROM clocked_bid b JOIN side_input FOR SYSTEM_TIME AS OF b.proc_time AS s
        ON MOD(b.auction, 10000) = s.`key`
    """,
    "q14": """
        SELECT auction, bidder, 0.908 * price AS price,
            CASE WHEN HOUR(date_time) >= 8 AND HOUR(date_time) <= 18 THEN 'dayTime'
                 WHEN HOUR(date_time) <= 6 OR HOUR(date_time) >= 20 THEN 'nightTime'
                 ELSE 'otherTime' END AS bid_time_type,
            date_time, extra, count_char(extra, 'c') AS c_counts
        FROM bid WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000
    """,
    "q15": f"""
        SELECT {_DAY} AS `day`, {_BIDS}, {_BIDDERS}, {_AUCTIONS} FROM bid GROUP BY {_DAY}
    """,
    "q16": f"""
        SELECT channel, {_DAY} AS `day`, max(DATE_FORMAT(date_time, 'HH:mm')) AS `minute`,
            {_BIDS}, {_BIDDERS}, {_AUCTIONS}
        FROM bid GROUP BY channel, {_DAY}
    """,
    "q17": f"""
        SELECT auction, {_DAY} AS `day`, {_BIDS}, min(price) AS min_price,
            max(price) AS max_price, avg(price) AS avg_price, sum(price) AS sum_price
        FROM bid GROUP BY auction, {_DAY}
    """,
    "q18": """
        SELECT auction, bidder, price, channel, url, date_time, extra FROM (
            SELECT *, ROW_NUMBER() OVER (
                PARTITION BY bidder, auction ORDER BY date_time DESC
            ) AS place FROM bid
        ) WHERE place <= 1
    """,
    "q19": """
        SELECT auction, bidder, price, channel, url, date_time, extra, place AS `rank` FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC) AS place
            FROM bid
        ) WHERE place <= 10
    """,
    "q20": """
        SELECT auction, bidder, price, channel, url, b.date_time AS date_time, b.extra AS extra,
            item_name, description, initial_bid, reserve, a.date_time AS opened, expires, seller,
            category, a.extra AS auction_extra
        FROM bid b JOIN auction a ON b.auction = a.id WHERE a.category = 10
    """,
    "q21": f"""
        SELECT auction, bidder, price, channel, CASE
            WHEN lower(channel) = 'apple' THEN '0'
            WHEN lower(channel) = 'google' THEN '1'
            WHEN lower(channel) = 'facebook' THEN '2'
            WHEN lower(channel) = 'baidu' THEN '3'
            ELSE {_CHANNEL_ID} END AS channel_id
        FROM bid WHERE {_CHANNEL_ID} IS NOT NULL
            OR lower(channel) IN ('apple', 'google', 'facebook', 'baidu')
    """,
    "q22": """
        SELECT auction, bidder, price, channel, SPLIT_INDEX(url, '/', 3) AS dir1,
            SPLIT_INDEX(url, '/', 4) AS dir2, SPLIT_INDEX(url, '/', 5) AS dir3
        FROM bid
    """,
}
"""The SELECT of each query."""


def make_script(query: str, topic: Topic) -> str:
    """Return the statements of a query over the events of a topic, which is read to its end."""
    views = [
        f"CREATE VIEW {name} AS SELECT {_COLUMNS[name]} FROM events WHERE event_type = {number}"
        for name, number in EVENT_TYPES.items()
    ]
    statements = (
        _make_table(topic),
        *views,
        "CREATE VIEW clocked_bid AS SELECT *, PROCTIME() AS proc_time FROM bid",
        "CREATE TABLE side_input (`key` BIGINT, `value` STRING) WITH ('connector' = 'side-input')",
        FLINK_QUERIES[query],
    )
    return "\n--\n".join(statements)


def _make_table(topic: Topic) -> str:
    types = {pa.int64(): "BIGINT", pa.string(): "STRING"}
    columns = ", ".join(f"{column.name} {types[column.type]}" for column in RECORDS)
    return f"""
        CREATE TABLE events (
            {columns},
            event_time AS {_to_time("date_time")},
            WATERMARK FOR event_time AS event_time - INTERVAL '4' SECOND
        ) WITH (
            'connector' = 'kafka', 'topic' = '{topic.name}', 'format' = 'json',
            'properties.bootstrap.servers' = '{topic.bootstrap_servers}',
            'properties.group.id' = 'nexmark-flink',
            'properties.isolation.level' = 'read_committed',
            'properties.max.poll.records' = '5000',
            'scan.startup.mode' = 'earliest-offset', 'scan.bounded.mode' = 'latest-offset'
        )
    """
