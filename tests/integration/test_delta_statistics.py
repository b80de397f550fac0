"""Statistics of Delta files: a reader that skips files by them finds every row."""

from __future__ import annotations

import json
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, QueryBuilder
from tests.integration.lake_sink_kit import DeltaJob

_UTC = timezone.utc
_V: Any = cast("Any", pc).field("v")
_COLUMNS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int8(), [-128, 127, 0]),
    (pa.bool_(), [True, False]),
    (pa.float32(), [1.5, -0.0, 3.4028234663852886e38]),
    (pa.float64(), [1.5, -0.0, 1.7976931348623157e308, 5e-324]),
    (pa.float64(), [1.5, float("inf"), float("-inf")]),
    (pa.decimal128(38, 10), [Decimal("-1.5"), Decimal("9" * 28 + "." + "9" * 10)]),
    (pa.decimal128(3, 0), [Decimal(-999), Decimal(999)]),
    (pa.date32(), [date(1, 1, 1), date(1582, 10, 10), date(9999, 12, 31)]),
    (pa.timestamp("us", "UTC"), [
        datetime(2024, 1, 1, 0, 0, 0, 298_677, _UTC), datetime(1850, 1, 1, 0, 0, 0, 999_999, _UTC),
        datetime(1, 1, 1, 0, 0, 0, 1, _UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, _UTC),
    ]),
    (pa.timestamp("us"), [
        datetime(2024, 1, 1, 0, 0, 0, 298_677), datetime(1969, 12, 31, 23, 59, 59, 999_999),
    ]),
    (pa.string(), [
        "", " ", "a" * 32, "a" * 33, "b" * 31 + "\U0001f600" * 9, "\U0010ffff" * 40, "\ud7ff" * 40,
        "\uffff" * 40, "x" * 5_000,
    ]),
    (pa.binary(), [b"", b"\0", b"\xff" * 40]),
]  # fmt: skip


def _schema(kind: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", kind)])


def _in_files(directory: Path, kind: pa.DataType, *files: list[Any]) -> DeltaJob:
    """Return a job that has written each of `files` in a checkpoint of its own."""
    job = DeltaJob(directory, _schema(kind)).open()
    number = 0
    for checkpoint, values in enumerate(files, 1):
        rows = [{"id": number + at, "v": value} for at, value in enumerate(values)]
        number += len(values)
        job.commit(checkpoint, job.prepare(checkpoint, rows, first_checkpoint=checkpoint))
    return job


def _dataset(job: DeltaJob) -> Any:
    return cast("Any", DeltaTable(job.path)).to_pyarrow_dataset()


def _statistics(job: DeltaJob) -> str:
    """Return what the log says of the only file of the table."""
    (statistics,) = [
        json.loads(line)["add"]["stats"]
        for file in sorted((job.path / "_delta_log").glob("*.json"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if '"add"' in line
    ]
    return str(statistics)


def _bounds(job: DeltaJob) -> tuple[Any, Any]:
    """Return the lowest and the highest values of the only file of the table."""
    statistics = json.loads(_statistics(job))
    return statistics.get("minValues"), statistics.get("maxValues")


@pytest.mark.parametrize(("kind", "values"), _COLUMNS)
def test_each_value_is_found_by_a_filter_in_a_file_alone_and_beside_others(
    tmp_path: Path, kind: pa.DataType, values: list[Any]
) -> None:
    job = _in_files(tmp_path, kind, *([value] for value in values), [None], [None, *values])
    dataset = _dataset(job)
    for value in values:
        found = dataset.to_table(filter=pa.scalar(value, kind) == _V).column("v")
        assert found.to_pylist() == [value, value]
    assert dataset.to_table(filter=_V.is_null()).num_rows == 2


def test_a_nan_hides_no_other_value_of_its_file_and_is_found(tmp_path: Path) -> None:
    nan = float("nan")
    job = _in_files(tmp_path, pa.float64(), [1.0, nan, 3.0], [nan])
    dataset = _dataset(job)
    assert dataset.to_table(filter=_V == 3.0).num_rows == 1
    assert dataset.to_table(filter=_V.is_nan()).num_rows == 2


def test_bounds_of_times_are_whole_milliseconds_around_all_values(tmp_path: Path) -> None:
    times = [datetime(2024, 1, 1, 0, 0, 0, 298_677, _UTC), datetime(2024, 1, 2, 0, 0, 0, 1, _UTC)]
    job = _in_files(tmp_path, pa.timestamp("us", "UTC"), times)
    lowest, highest = _bounds(job)
    assert lowest == {"id": 0, "v": "2024-01-01T00:00:00.298Z"}
    assert highest == {"id": 1, "v": "2024-01-02T00:00:00.001Z"}
    query = "SELECT id FROM t WHERE v >= TIMESTAMP '2024-01-02T00:00:00.000001Z'"
    reader = QueryBuilder().register("t", DeltaTable(job.path))
    assert pa.table(cast("Any", reader.execute(query))).to_pylist() == [{"id": 1}]


def test_decimals_and_long_texts_have_exact_or_wider_bounds(tmp_path: Path) -> None:
    large = Decimal("-12345678901234567890.0000000001")
    job = _in_files(tmp_path / "decimals", pa.decimal128(38, 10), [large])
    assert _statistics(job).count(f'"v":{large}') == 2
    job = _in_files(tmp_path / "texts", pa.string(), ["a" * 40, "b" * 31 + "\ud7ff" * 9])
    lowest, highest = _bounds(job)
    assert lowest["v"] == "a" * 32
    assert highest["v"] == "b" * 31 + "\ue000"


def test_a_file_has_bounds_of_every_column_or_of_none(tmp_path: Path) -> None:
    job = _in_files(tmp_path / "infinite", pa.float64(), [float("inf")])
    assert _bounds(job) == (None, None)
    job = _in_files(tmp_path / "null", pa.float64(), [None])
    assert _bounds(job) == ({"id": 0}, {"id": 0})
