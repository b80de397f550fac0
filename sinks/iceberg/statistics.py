"""The counts and bounds of one data file in Iceberg's manifests, from its Parquet footer.

A wrong bound makes readers and upserts skip the file. So a column has bounds only if every row
group of it has bounds.

Source: Iceberg specification, Manifests and Appendix D (single-value serialization).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyiceberg.conversions import to_bytes
from pyiceberg.io.pyarrow import (
    MetricModeTypes,
    MetricsMode,
    compute_statistics_plan,
    parquet_path_to_id_mapping,
)
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    DecimalType,
    DoubleType,
    FloatType,
    PrimitiveType,
    StringType,
)
from pyiceberg.utils.decimal import unscaled_to_decimal
from pyiceberg.utils.truncate import truncate_upper_bound_binary_string

from onceflow.sinks.lake.text_bounds import shorten_upper_text


@dataclass
class _Column:
    """The facts about one column from the row groups so far."""

    kind: PrimitiveType
    mode: MetricsMode
    size_bytes: int = 0
    values: int = 0
    nulls: int | None = 0
    """The number of nulls; None if a row group does not record it."""
    bounds: list[Any] = field(default_factory=list[Any])
    has_bounds: bool = True

    def add(self, chunk: Any) -> None:
        """Add the facts of the column's part in one row group."""
        self.size_bytes += chunk.total_compressed_size
        self.values += chunk.num_values
        statistics = chunk.statistics
        if statistics is None or not statistics.has_null_count:
            self.nulls, self.has_bounds = None, False
            return
        if self.nulls is not None:
            self.nulls += statistics.null_count
        if statistics.has_min_max:
            raw_bounds = (statistics.min_raw, statistics.max_raw)
            self.bounds += [_to_value(self.kind, raw) for raw in raw_bounds]
        elif statistics.null_count < chunk.num_values and not isinstance(
            # Parquet has no bounds of NaN, and Iceberg's bounds ignore NaN.
            self.kind,
            FloatType | DoubleType,
        ):
            self.has_bounds = False

    @property
    def lower_bound(self) -> bytes | None:
        """The smallest value, or a prefix of it; None if there is none."""
        if not self.has_bounds or not self.bounds:
            return None
        lowest = min(self.bounds)
        return to_bytes(self.kind, lowest[: self.mode.length] if self.is_truncated else lowest)

    @property
    def upper_bound(self) -> bytes | None:
        """The largest value, or a shorter value above it; None if there is none."""
        if not self.has_bounds or not self.bounds:
            return None
        highest = max(self.bounds)
        if self.is_truncated:
            length = self.mode.length or 0
            if isinstance(highest, str):
                highest = shorten_upper_text(highest, length)
            else:
                highest = truncate_upper_bound_binary_string(highest, length)
        return None if highest is None else to_bytes(self.kind, highest)

    @property
    def is_truncated(self) -> bool:
        """True if bounds may be shorter than values."""
        return isinstance(self.kind, StringType | BinaryType) and self.mode.length is not None


def describe_statistics(
    footer: Any, schema: Schema, properties: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments of a `DataFile` about the rows of a file; `schema` is the file's.

    `footer` is a `pyarrow.parquet.FileMetaData`.
    """
    plan = compute_statistics_plan(schema, dict(properties))
    ids = parquet_path_to_id_mapping(schema)
    columns: dict[int, _Column] = {}
    split_offsets: list[int] = []
    for group_number in range(footer.num_row_groups):
        group = footer.row_group(group_number)
        split_offsets.append(_find_offset(group.column(0)))
        for number in range(footer.num_columns):
            chunk = group.column(number)
            planned = plan[ids[chunk.path_in_schema]]
            column = columns.setdefault(
                planned.field_id, _Column(planned.iceberg_type, planned.mode)
            )
            column.add(chunk)
    counted = {
        field_id: column
        for field_id, column in columns.items()
        if column.mode.type is not MetricModeTypes.NONE
    }
    bounded = {
        field_id: column
        for field_id, column in counted.items()
        if column.mode.type is not MetricModeTypes.COUNTS
    }
    return {
        "record_count": footer.num_rows,
        "column_sizes": {field_id: column.size_bytes for field_id, column in columns.items()},
        "value_counts": {field_id: column.values for field_id, column in counted.items()},
        "null_value_counts": _drop_unknown({key: column.nulls for key, column in counted.items()}),
        "nan_value_counts": {},
        "lower_bounds": _drop_unknown({key: column.lower_bound for key, column in bounded.items()}),
        "upper_bounds": _drop_unknown({key: column.upper_bound for key, column in bounded.items()}),
        "split_offsets": sorted(split_offsets),
    }


def _to_value(kind: PrimitiveType, raw: Any) -> Any:
    """Return the value of a bound that Parquet stores as `raw`, with dates and times as numbers.

    Python has no dates outside of the years 1 to 9999.
    """
    match kind:
        case StringType():
            return raw.decode()
        case DecimalType():
            unscaled = int.from_bytes(raw, "big", signed=True) if isinstance(raw, bytes) else raw
            return unscaled_to_decimal(unscaled, kind.scale)
        case _:
            return raw


def _find_offset(chunk: Any) -> int:
    """Return the offset of a row group whose first column is `chunk`."""
    if chunk.has_dictionary_page and chunk.dictionary_page_offset < chunk.data_page_offset:
        return int(chunk.dictionary_page_offset)
    return int(chunk.data_page_offset)


def _drop_unknown(facts: dict[int, Any]) -> dict[int, Any]:
    return {field_id: fact for field_id, fact in facts.items() if fact is not None}
