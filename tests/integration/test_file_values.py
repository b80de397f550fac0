"""Values in published files, against the catalogue: as they were written, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from tests.support.edge_values import NESTED, SCALARS, EdgeColumn
from tests.support.exact_values import exact_values, same
from tests.support.lake_values import with_ids

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.committables import Committed
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import CommitterContext, OnBadRow, WriterContext
from onceflow.sinks import FileSink

Format = Literal["parquet", "json"]
_IDS: dict[str, Any] = {"job": "job", "uid": "rows", "sink_id": "job.rows", "staging": None}


def publish(directory: Path, rows: pa.RecordBatch, **settings: Any) -> dict[int, str] | None:
    """Write `rows` in one checkpoint; return why rows were refused, None if their type was."""
    sink = FileSink(str(directory), **settings)
    context = CommitterContext(attempt=AttemptId(1), log_id="log-1", **_IDS)
    try:
        sink.open(context, rows.schema)
    except ConfigError as error:
        refusal = str(error)
    else:
        writer = sink.writer(
            WriterContext(
                subtask=0,
                parallelism=1,
                attempt=AttemptId(1),
                first_checkpoint=CheckpointId(1),
                schema=rows.schema,
                on_bad_row=OnBadRow.DEAD_LETTER,
                **_IDS,
            )
        )
        writer.write(rows)
        rejected = writer.take_rejected()
        committer = sink.committer(context)
        for committable in writer.pre_commit(CheckpointId(1)):
            assert isinstance(committer.commit(committable), Committed)
        ids = [row for each in rejected for row in each.rows.column("id").to_pylist()]
        return dict(zip(ids, (why for each in rejected for why in each.reasons), strict=True))
    assert "column 'v'" in refusal
    return None


def _find_files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("part-*") if "_onceflow" not in path.parts]


def _check(rows: pa.RecordBatch, refused: dict[int, str], read: dict[int, object]) -> None:
    for row, value in enumerate(exact_values(rows.column("v"))):
        if row in refused:
            assert "column 'v'" in refused[row]
            assert row not in read
        else:
            assert same(read[row], value), (row, value, read[row])


def _check_parquet(edge: EdgeColumn, directory: Path) -> None:
    rows = with_ids({"v": edge.values})
    refused = publish(directory, rows)
    if refused is None:
        return
    read: dict[int, object] = {}
    for path in _find_files(directory):
        table = pq.ParquetFile(path).read()
        read |= zip(table["id"].to_pylist(), exact_values(table["v"]), strict=True)
    _check(rows, refused, read)


_SHORT = ("timestamp[s]", "dictionary of string", "struct of timestamp[s]", "string_view")
_SHORT_NESTED = (
    "list of uuid",
    "list of struct of string",
    "required struct of double",
    "map to map of int64",
)


def _named(*names: str) -> list[EdgeColumn]:
    return [one for one in (*SCALARS, *NESTED) if one.name in names]


def test_columns_come_back_from_parquet_as_they_were(tmp_path: Path) -> None:
    for number, edge in enumerate(_named(*_SHORT, *_SHORT_NESTED)):
        _check_parquet(edge, tmp_path / str(number))


@pytest.mark.slow
def test_every_column_comes_back_from_parquet_as_it_was(tmp_path: Path) -> None:
    for number, edge in enumerate((*SCALARS, *NESTED)):
        _check_parquet(edge, tmp_path / str(number))


@pytest.mark.parametrize("kind", ["int64", "bool", "string", "date32[day]"])
def test_a_partition_value_is_read_from_its_directory_as_it_was(kind: str, tmp_path: Path) -> None:
    (edge,) = _named(kind)
    rows = with_ids({"v": edge.values})
    refused = publish(tmp_path, rows, partition_by=("v",))
    assert refused is not None
    partitioning = ds.partitioning(pa.schema([("v", edge.type)]), flavor="hive")
    table = ds.dataset(str(tmp_path), partitioning=partitioning).to_table()
    read = dict(zip(table["id"].to_pylist(), exact_values(table["v"]), strict=True))
    _check(rows, refused, read)


def test_a_date_that_json_cannot_hold_is_refused_at_any_depth(tmp_path: Path) -> None:
    for number, edge in enumerate(
        _named("list of date32[day]", "timestamp[us, tz=America/New_York]", "date64[ms]")
    ):
        directory = tmp_path / str(number)
        rows = with_ids({"v": edge.values})
        refused = publish(directory, rows, format="json")
        assert refused
        assert all("years 1 to 9999" in why for why in refused.values())
        texts = [path.read_text() for path in _find_files(directory)]
        lines = [json.loads(line) for text in texts for line in text.splitlines()]
        assert {line["id"] for line in lines} == set(range(rows.num_rows)) - refused.keys()


@pytest.mark.parametrize("form", ["parquet", "json"])
def test_a_null_record_with_required_fields_is_null_and_a_null_field_is_refused(
    form: Format, tmp_path: Path
) -> None:
    fields = [pa.field("a", pa.int32(), nullable=False)]
    parts = [pa.array([1, None, None], pa.int32())]
    mask = pa.array([False, True, False])
    rows = with_ids({"v": pa.StructArray.from_arrays(parts, fields=fields, mask=mask)})
    refused = publish(tmp_path, rows, format=form, compression="none")
    assert refused is not None
    assert "column 'v'" in refused[2]
    (path,) = _find_files(tmp_path)
    if form == "parquet":
        read = pq.ParquetFile(path).read().to_pylist()
    else:
        read = [json.loads(line) for line in path.read_text().splitlines()]
    assert read == [{"id": 0, "v": {"a": 1}}, {"id": 1, "v": None}]
