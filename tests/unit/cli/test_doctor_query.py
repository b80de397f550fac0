"""Tests the doctor's findings about a query, by the files of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from onceflow.cli.doctor.query import check_query
from onceflow.connectors.spark.streaming.checkpoint_location import CheckpointLocation
from onceflow.core.spi.connector import Level


def query_at(directory: Path, planned: int, committed: int) -> str:
    for name, last in (("offsets", planned), ("commits", committed)):
        (directory / name).mkdir(parents=True)
        for number in range(last + 1):
            (directory / name / str(number)).write_text("v1\n{}")
            (directory / name / f".{number}.crc").write_text("")
    (directory / "metadata").write_text('{"id":"6f1c1c8e-0000-4000-8000-000000000000"}')
    return str(directory)


@pytest.mark.parametrize(
    ("planned", "committed", "level", "text"),
    [
        (-1, -1, Level.OK, "no batch yet"),
        (7, 7, Level.OK, "batch 7 is the last one, and is done"),
        (8, 7, Level.OK, "batch 8 is planned but not done"),
        (0, -1, Level.OK, "batch 0 is planned but not done"),
        (9, 7, Level.PROBLEM, "batches 8 to 9 are planned"),
    ],
)
def test_where_a_query_stands_is_told(
    tmp_path: Path, planned: int, committed: int, level: Level, text: str
) -> None:
    location = query_at(tmp_path / "query", planned, committed)
    whose, stands = check_query(location)
    assert "6f1c1c8e" in whose.found
    assert CheckpointLocation(location).sink_id() in whose.found
    assert stands.level is level
    assert text in stands.found


def test_a_directory_that_is_no_checkpoint_is_a_problem(tmp_path: Path) -> None:
    (finding,) = check_query(str(tmp_path))
    assert finding.level is Level.PROBLEM
    assert "has no metadata of the query" in finding.found
