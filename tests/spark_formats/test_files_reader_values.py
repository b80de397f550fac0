"""Values in published files, as rows of Spark: as they were, or refused by name."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from tests.integration.test_file_values import publish
from tests.support.edge_values import NESTED, SCALARS, EdgeColumn
from tests.support.exact_values import exact_values, same
from tests.support.lake_values import with_ids

from onceflow.connectors.spark.arrow_rows import arrow_schema
from onceflow.connectors.spark.readers.files import FilesBatchReader, files_read, files_schema
from onceflow.core.errors import ConfigError

_SHORT = frozenset(
    {"int64", "uint64", "double", "decimal128(38, 10)", "decimal256(50, 4)", "decimal128(5, -2)"}
    | {"string", "binary", "date32[day]", "timestamp[us, tz=UTC]", "timestamp[ns]", "duration[us]"}
    | {"time64[us]", "null", "dictionary of string", "list of uint64", "list of timestamp[us]"}
    | {"required struct of string", "map to struct of int64", "map of decimal256(50, 4)"}
)


def _read(directory: Path) -> pa.Table:
    """Return what Spark gets, in the types that it demands.

    Raises:
        ConfigError: A column has no type in Spark, or a value does not fit that type.
    """
    options = {"path": str(directory)}
    schema = files_schema(options)
    reader = FilesBatchReader(files_read(options), schema)
    batches = [batch for task in reader.partitions() for batch in reader.read(task)]
    return pa.Table.from_batches(batches, arrow_schema(schema))


def _is_in_spark(kind: pa.DataType) -> bool:
    """Return whether Spark has a type for `kind`: its decimals have 38 digits, and no others."""
    if pa.types.is_decimal(kind):
        return kind.precision <= 38 and 0 <= kind.scale <= kind.precision
    inner = (kind.field(at).type for at in range(kind.num_fields))
    return all(map(_is_in_spark, inner)) if pa.types.is_nested(kind) else True


def _find_fault(edge: EdgeColumn, directory: Path) -> str:
    """Return what is wrong with a column that was written and read, or nothing."""
    rows = with_ids({"v": edge.values})
    refused = publish(directory, rows)
    if refused is None or len(refused) == rows.num_rows:
        return ""
    try:
        read = _read(directory)
    except ConfigError as error:
        is_named = "column 'v'" in str(error)
        return "" if is_named else f"{edge.name} is refused by: {error}"
    if not _is_in_spark(read.schema.field("v").type):
        return f"{edge.name} is read as {read.schema.field('v').type}, which Spark does not have"
    written = exact_values(edge.values)
    for row, value in zip(read["id"].to_pylist(), exact_values(read["v"]), strict=True):
        meant = written[row]
        if edge.name == "uint64" and isinstance(meant, int):
            meant = Decimal(meant)
        if not same(value, meant):
            return f"{edge.name}: {meant!r:.90} was read as {value!r:.90}"
    return ""


def _judge(edges: list[EdgeColumn], directory: Path) -> list[str]:
    found = (_find_fault(edge, directory / str(at)) for at, edge in enumerate(edges))
    return [fault for fault in found if fault]


def test_columns_of_files_are_rows_of_spark_or_refused_by_name(tmp_path: Path) -> None:
    edges = [edge for edge in (*SCALARS, *NESTED) if edge.name in _SHORT]
    assert len(edges) == len(_SHORT)
    assert _judge(edges, tmp_path) == []


@pytest.mark.slow
def test_every_column_of_files_is_rows_of_spark_or_refused_by_name(tmp_path: Path) -> None:
    assert _judge([*SCALARS, *NESTED], tmp_path) == []


def test_a_column_of_any_type_of_spark_is_read(tmp_path: Path) -> None:
    """A reader that refuses all columns would pass for an exact one."""
    read: list[str] = []
    for at, edge in enumerate(edge for edge in SCALARS if edge.name in _SHORT):
        if publish(tmp_path / str(at), with_ids({"v": edge.values.slice(0, 1)})) is None:
            continue
        try:
            _read(tmp_path / str(at))
        except ConfigError:
            continue
        read.append(edge.name)
    assert {"int64", "uint64", "double", "decimal128(38, 10)", "string", "binary"} <= {*read}
    assert {"date32[day]", "timestamp[us, tz=UTC]", "null"} <= {*read}
