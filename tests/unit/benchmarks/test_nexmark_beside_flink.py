"""Flink's side of Nexmark: its events, its queries, and the comparison of its results."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from benchmarks.nexmark.beside_flink import Compared, Run
from benchmarks.nexmark.events import load_events, make_records
from benchmarks.nexmark.expected import Judge
from benchmarks.nexmark.flink_queries import FLINK_QUERIES, make_script
from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.topic import EVENT_TYPES, RECORDS, Topic

from onceflow.sources import NexmarkSource

SOURCE = NexmarkSource(events=1_003, event_interval_us=1_000)
TOPIC = Topic(bootstrap_servers="127.0.0.1:9092", name="nexmark")


def test_the_records_are_the_events_in_their_order() -> None:
    numbered = list(make_records(load_events(SOURCE)))
    assert [number for number, _ in numbered] == list(range(1_003))
    records = [json.loads(record) for _, record in numbered]
    kinds = [record["event_type"] for record in records]
    assert kinds[:6] == [0, 1, 1, 1, 2, 2]
    assert kinds.count(EVENT_TYPES["person"]) == 21
    assert all(after["date_time"] - before["date_time"] == 1 for before, after in pairwise(records))
    assert {name for record in records for name in record} == set(RECORDS.names)
    assert all(None not in record.values() for record in records)


def test_every_query_but_q6_has_sql_of_flink() -> None:
    assert set(QUERIES) - set(FLINK_QUERIES) == {"q6"}
    for query in FLINK_QUERIES:
        statements = make_script(query, TOPIC).split("\n--\n")
        assert statements[-1] == FLINK_QUERIES[query]
        assert "'scan.bounded.mode' = 'latest-offset'" in statements[0]


def write_changes(directory: Path, rows: list[dict[str, Any]]) -> None:
    lines = "\n".join(map(json.dumps, rows))
    (directory / "changes-0.json").write_text(lines)


def expected_rows(query: str) -> list[dict[str, Any]]:
    """Return the rows of q17 as Flink writes them: all values are texts."""
    table = Judge(SOURCE).compute(query).to_pylist()
    return [{"_count": 1, **{name: str(value) for name, value in row.items()}} for row in table]


@pytest.mark.parametrize("query", ["q16", "q17"])
def test_changes_of_a_table_have_the_result_that_remains(tmp_path: Path, query: str) -> None:
    """Texts such as "00:00" stay texts."""
    rows = expected_rows(query)
    for row in rows:
        if "avg_price" in row:
            row["avg_price"] = str(int(float(row["avg_price"])))
    outdated = {**rows[0], "total_bids": "999"}
    write_changes(tmp_path, [outdated, {**outdated, "_count": -1}, *rows])
    assert Judge(SOURCE).find_difference_of_changes(query, tmp_path) == ""


@pytest.mark.parametrize("mistake", ["missing", "twice", "wrong", "not removed"])
def test_a_wrong_table_is_a_difference(tmp_path: Path, mistake: str) -> None:
    rows = expected_rows("q22")
    changes = {
        "missing": rows[1:],
        "twice": [rows[0], *rows],
        "wrong": [{**rows[0], "price": "1"}, *rows[1:]],
        "not removed": [{**rows[0], "price": "1"}, *rows],
    }
    write_changes(tmp_path, changes[mistake])
    assert "rows are missing" in Judge(SOURCE).find_difference_of_changes("q22", tmp_path)


def test_no_changes_are_a_difference(tmp_path: Path) -> None:
    write_changes(tmp_path, [])
    assert "no rows" in Judge(SOURCE).find_difference_of_changes("q22", tmp_path)


def test_a_ratio_is_that_of_each_turn() -> None:
    compared = Compared(
        query="q0",
        difference="",
        flink_difference=None,
        ours=(Run(1.0, 10.0), Run(2.0, 10.0), Run(3.0, 10.0)),
        flink=(Run(2.0, 10.0), Run(8.0, 10.0), Run(3.0, 10.0)),
    )
    assert compared.as_json()["ratio"] == {"median": 0.5, "min": 0.25, "max": 1.0, "runs": 3}
    assert compared.is_right
