"""Which columns of a data file get a dictionary, and what that makes of the file."""

from __future__ import annotations

import io
import random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from onceflow.sinks.lake.data_files import choose_dictionaries

_ROWS = 100_000
_RANDOM = random.Random(7)
_TABLE = pa.table(
    {
        "id": pa.array(range(_ROWS)),
        "at": pa.array(range(1_767_225_600_000, 1_767_225_600_000 + _ROWS)),
        "token": pa.array([f"{_RANDOM.getrandbits(64):016x}" for _ in range(_ROWS)]),
        "country": pa.array([_RANDOM.choice(["de", "fr", "pl"]) for _ in range(_ROWS)]),
        "cents": pa.array([_RANDOM.randrange(2_000) for _ in range(_ROWS)]),
        "day": pa.array([number // 20 for number in range(_ROWS)]),
        "nothing": pa.nulls(_ROWS, pa.string()),
        "is_new": pa.array([number % 2 == 0 for number in range(_ROWS)]),
    }
)


def test_columns_whose_values_come_again_get_a_dictionary() -> None:
    """Also where they come again only right after each other, as in sorted rows."""
    assert choose_dictionaries(_TABLE) == ["country", "cents", "day", "nothing"]


def test_a_file_without_needless_dictionaries_is_smaller_and_has_the_same_rows() -> None:
    sizes: list[int] = []
    for use_dictionary in (True, choose_dictionaries(_TABLE)):
        file = io.BytesIO()
        settings: dict[str, Any] = {"use_dictionary": use_dictionary, "compression": "zstd"}
        with pq.ParquetWriter(file, _TABLE.schema, **settings) as writer:
            writer.write_table(_TABLE)
        sizes.append(file.tell())
        file.seek(0)
        assert pq.read_table(file).equals(_TABLE)
    assert sizes[1] < sizes[0]


def test_a_few_rows_and_nested_ones_are_written_as_ever() -> None:
    few = pa.table({"id": pa.array([1, 2, 3]), "kind": pa.array(["a", "a", "a"])})
    assert choose_dictionaries(few) == ["kind"]
    nested = pa.table({"tags": pa.array([["a"], ["b"]]), "id": pa.array([1, 2])})
    assert choose_dictionaries(nested) is True
