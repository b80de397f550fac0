"""The results of the queries by DuckDB, and their comparison with what a job has written.

Some queries update their results: the job's files have each update. `latest` then selects the last
one of each key. It needs no order of the files, because a column of the result only ever grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds

from benchmarks.nexmark.events import load_events
from onceflow.sources import NexmarkSource

_DAY = "strftime(date_time, '%Y-%m-%d')"


def _bucket(moment: str) -> str:
    """Return the start of the window of ten seconds."""
    return f"time_bucket(INTERVAL 10 SECOND, {moment}::TIMESTAMP)"


def _by_rank(count: str, name: str) -> str:
    """Return a count of all bids and of those of each rank."""
    return f"""
        {count} AS total_{name},
        {count} FILTER (price < 10000) AS rank1_{name},
        {count} FILTER (price >= 10000 AND price < 1000000) AS rank2_{name},
        {count} FILTER (price >= 1000000) AS rank3_{name}
    """


_BIDS = _by_rank("count(*)", "bids")
_BIDDERS = _by_rank("count(DISTINCT bidder)", "bidders")
_AUCTIONS = _by_rank("count(DISTINCT auction)", "auctions")
_WINNERS = """
    SELECT DISTINCT ON (id) a.* EXCLUDE (n, date_time), a.date_time AS opened,
        bidder, price, b.date_time AS date_time, b.extra AS bid_extra
    FROM auction a JOIN bid b
    ON a.id = b.auction AND b.date_time BETWEEN a.date_time AND a.expires
    ORDER BY price DESC, b.n
"""
"""Each auction with its highest bid."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The SQL of a query, and of the last updates among the rows of `result`."""

    query: str
    """A query over `person`, `auction` and `bid`. Its columns are compared."""
    latest: str = "FROM result"


EXPECTED: Mapping[str, Expected] = {
    "q0": Expected("SELECT auction, bidder, price, date_time, extra FROM bid"),
    "q1": Expected(
        "SELECT auction, bidder, 0.908::DOUBLE * price AS price, date_time, extra FROM bid"
    ),
    "q2": Expected("SELECT auction, price FROM bid WHERE auction % 123 = 0"),
    "q3": Expected(
        """
        SELECT name, city, state, a.id FROM auction a JOIN person p ON a.seller = p.id
        WHERE category = 10 AND state IN ('OR', 'ID', 'CA')
        """
    ),
    "q4": Expected(
        f"""
        SELECT category, sum(price)::DOUBLE / count(*) AS average, count(*) AS auctions
        FROM ({_WINNERS}) GROUP BY category
        """,
        "SELECT DISTINCT ON (category) * FROM result ORDER BY auctions DESC",
    ),
    "q5": Expected(
        """
        SELECT auction, window_start, window_end, bids FROM (
            SELECT auction, window_start, window_start + INTERVAL 10 SECOND AS window_end,
                count(*) AS bids
            FROM (
                SELECT auction, time_bucket(INTERVAL 2 SECOND, date_time::TIMESTAMP)
                    - INTERVAL 2 SECOND * unnest(range(5)) AS window_start
                FROM bid
            )
            GROUP BY auction, window_start
        )
        QUALIFY bids = max(bids) OVER (PARTITION BY window_start)
        """
    ),
    "q6": Expected(
        f"""
        SELECT seller, sum(price) FILTER (place <= 10)::DOUBLE / count(*) FILTER (place <= 10)
            AS average, count(*) AS auctions
        FROM (
            SELECT *, row_number() OVER (PARTITION BY seller ORDER BY expires DESC, id DESC)
                AS place
            FROM ({_WINNERS})
        )
        GROUP BY seller
        """,
        "SELECT DISTINCT ON (seller) * FROM result ORDER BY auctions DESC",
    ),
    "q7": Expected(
        f"""
        SELECT auction, price, bidder, date_time, extra FROM bid
        QUALIFY price = max(price) OVER (PARTITION BY {_bucket("date_time")})
        """
    ),
    "q8": Expected(
        f"""
        SELECT DISTINCT p.id, name, {_bucket("p.date_time")} AS starttime
        FROM person p JOIN auction a
        ON p.id = a.seller AND {_bucket("p.date_time")} = {_bucket("a.date_time")}
        """
    ),
    "q9": Expected(
        f"""
        SELECT id, item_name, description, initial_bid, reserve, opened, expires, seller, category,
            extra, bidder, price, date_time, bid_extra, 1 AS rank
        FROM ({_WINNERS})
        """,
        "SELECT DISTINCT ON (id) * FROM result ORDER BY price DESC, date_time",
    ),
    "q10": Expected(
        f"""
        SELECT auction, bidder, price, date_time, extra, {_DAY} AS day,
            strftime(date_time, '%H:%M') AS minute
        FROM bid
        """
    ),
    "q11": Expected(
        """
        SELECT bidder, min(date_time) AS window_start,
            max(date_time) + INTERVAL 10 SECOND AS window_end, count(*) AS bids
        FROM (
            SELECT *, count(*) FILTER (is_first) OVER (PARTITION BY bidder ORDER BY n) AS session
            FROM (
                SELECT *, coalesce(date_time - lag(date_time) OVER (PARTITION BY bidder ORDER BY n)
                    > INTERVAL 10 SECOND, true) AS is_first
                FROM bid
            )
        )
        GROUP BY bidder, session
        """
    ),
    "q12": Expected(
        "SELECT bidder, count(*) AS bids FROM bid GROUP BY bidder",
        "SELECT bidder, sum(bids)::BIGINT AS bids FROM result GROUP BY bidder",
    ),
    "q13": Expected(
        """
        SELECT auction, bidder, price, date_time, 'value ' || auction % 10000 AS value FROM bid
        """
    ),
    "q14": Expected(
        """
        SELECT auction, bidder, 0.908::DOUBLE * price AS price,
            CASE WHEN hour(date_time) BETWEEN 8 AND 18 THEN 'dayTime'
                 WHEN hour(date_time) <= 6 OR hour(date_time) >= 20 THEN 'nightTime'
                 ELSE 'otherTime' END AS bid_time_type,
            date_time, extra, len(extra) - len(replace(extra, 'c', '')) AS c_counts
        FROM bid WHERE 0.908::DOUBLE * price > 1000000 AND 0.908::DOUBLE * price < 50000000
        """
    ),
    "q15": Expected(
        f"SELECT {_DAY} AS day, {_BIDS}, {_BIDDERS}, {_AUCTIONS} FROM bid GROUP BY day",
        "SELECT DISTINCT ON (day) * FROM result ORDER BY total_bids DESC",
    ),
    "q16": Expected(
        f"""
        SELECT channel, {_DAY} AS day, max(strftime(date_time, '%H:%M')) AS minute,
            {_BIDS}, {_BIDDERS}, {_AUCTIONS}
        FROM bid GROUP BY channel, day
        """,
        "SELECT DISTINCT ON (channel, day) * FROM result ORDER BY total_bids DESC",
    ),
    "q17": Expected(
        f"""
        SELECT auction, {_DAY} AS day, {_BIDS}, min(price) AS min_price,
            max(price) AS max_price, sum(price)::DOUBLE / count(*) AS avg_price,
            sum(price)::BIGINT AS sum_price
        FROM bid GROUP BY auction, day
        """,
        "SELECT DISTINCT ON (auction, day) * FROM result ORDER BY total_bids DESC",
    ),
    "q18": Expected(
        "SELECT DISTINCT ON (bidder, auction) * EXCLUDE n FROM bid ORDER BY n DESC",
        "SELECT DISTINCT ON (bidder, auction) * FROM result ORDER BY date_time DESC",
    ),
    "q19": Expected(
        """
        SELECT * EXCLUDE n FROM (
            SELECT *, row_number() OVER (PARTITION BY auction ORDER BY price DESC, n) AS rank
            FROM bid
        ) WHERE rank <= 10
        """,
        "SELECT DISTINCT ON (auction, rank) * FROM result ORDER BY price DESC, date_time",
    ),
    "q20": Expected(
        """
        SELECT auction, bidder, price, channel, url, b.date_time, b.extra, item_name, description,
            initial_bid, reserve, a.date_time AS opened, expires, seller, category,
            a.extra AS auction_extra
        FROM bid b JOIN auction a ON b.auction = a.id WHERE category = 10
        """
    ),
    "q21": Expected(
        """
        SELECT * FROM (
            SELECT auction, bidder, price, channel, CASE lower(channel)
                WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2'
                WHEN 'baidu' THEN '3'
                ELSE nullif(regexp_extract(url, '(&|^)channel_id=([^&]*)', 2), '')
                END AS channel_id
            FROM bid
        ) WHERE channel_id IS NOT NULL
        """
    ),
    "q22": Expected(
        """
        SELECT auction, bidder, price, channel, split_part(url, '/', 4) AS dir1,
            split_part(url, '/', 5) AS dir2, split_part(url, '/', 6) AS dir3
        FROM bid
        """
    ),
}
"""What each query has to return.

The windows of q12 are those of the clock, so the sum of each bidder's windows is compared.
"""


_CHANGES = "changes-*.json"
WHOLE_AVERAGES = ("average", "avg_price")
"""The columns that are averages of integers."""


class Judge:
    """DuckDB with the events of a source."""

    def __init__(self, source: NexmarkSource) -> None:
        """Read all events. `source` has an end and one split."""
        self._database = load_events(source)

    def compute(self, query: str) -> pa.Table:
        """Return the rows of the right result."""
        table: pa.Table = self._database.sql(EXPECTED[query].query).to_arrow_table()
        return table

    def find_difference(self, query: str, directory: Path) -> str:
        """Return the difference of the rows in `directory` from the right ones, or no text."""
        expected = EXPECTED[query]
        # Directories of partitions are columns of text.
        hive = ds.partitioning(flavor="hive")
        rows = ds.dataset(str(directory), format="parquet", partitioning=hive).to_table()
        self._database.register("result", rows)
        if expected.latest != "FROM result" and (doubled := self._count_doubled_rows()):
            return f"{doubled} rows are there more than once"
        self._database.execute(f"CREATE OR REPLACE TEMP TABLE actual AS {expected.latest}")
        self._database.execute(f"CREATE OR REPLACE TEMP TABLE expected AS {expected.query}")
        columns = self._database.table("expected").columns
        if absent := set(columns) - set(self._database.table("actual").columns):
            return f"the rows have no columns {absent}"
        return self._compare(columns)

    def find_difference_of_changes(self, query: str, directory: Path) -> str:
        """Return the difference of a result that Flink SQL has changed, or no text.

        The files `changes-*.json` have each row that was added or removed. Columns that the result
        does not have are not compared.
        """
        run = self._database.execute
        run(f"CREATE OR REPLACE TEMP TABLE expected AS {EXPECTED[query].query}")
        kinds = {row[0]: row[1] for row in run("DESCRIBE expected").fetchall()}
        if not (written := _read_names(directory)):
            return "the result has no rows"
        columns = [name for name in written if name in kinds]
        for name in columns:
            if kinds[name] == "DOUBLE":
                # Flink SQL computes 0.908 as a decimal, and averages of integers as integers.
                exact = f"trunc({name})" if name in WHOLE_AVERAGES else f"round({name}, 3)"
                run(f"UPDATE expected SET {name} = {exact}")
        texts = {name: "BIGINT" if name == "_count" else "VARCHAR" for name in written}
        files = f"'{directory}/{_CHANGES}', format = 'newline_delimited', columns = {texts}"
        names = ", ".join(columns)
        values = ", ".join(f"CAST({name} AS {kinds[name]}) AS {name}" for name in columns)
        run(
            f"CREATE OR REPLACE TEMP TABLE actual AS SELECT {values} FROM ("
            f" SELECT {names}, unnest(range(sum(_count)::BIGINT)) FROM read_json({files})"
            f" GROUP BY {names})"
        )
        return self._compare(columns)

    def _compare(self, columns: Sequence[str]) -> str:
        """Return the difference of the tables `expected` and `actual`, or no text."""
        names = ", ".join(columns)
        missing, extra = (
            self._database.execute(
                f"SELECT {names} FROM {one} EXCEPT ALL SELECT {names} FROM {other}"
            ).fetchall()
            for one, other in (("expected", "actual"), ("actual", "expected"))
        )
        if not missing and not extra:
            return ""
        return (
            f"{len(missing)} rows are missing and {len(extra)} are too many, such as"
            f" {missing[:1]} and {extra[:1]}"
        )

    def _count_doubled_rows(self) -> int:
        """Return the number of different rows that `result` has more than once.

        Queries that emit a record for each change count in it, so no two records are equal. The
        last record of a key would hide a second one.
        """
        doubled = "SELECT count(*) FROM (FROM result GROUP BY ALL HAVING count(*) > 1)"
        return int(self._database.execute(doubled).fetchall()[0][0])


def _read_names(directory: Path) -> list[str]:
    """Return the names in the first line of changes, or no names if there are no lines."""
    for path in sorted(directory.glob(_CHANGES)):
        with path.open("rb") as lines:
            if line := lines.readline():
                return list(msgspec.json.decode(line))
    return []
