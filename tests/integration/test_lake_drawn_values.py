"""Columns of drawn types in lake tables: each value is as it was, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.lake_sink_kit import DeltaJob, IcebergJob, LakeJob
from tests.support.drawn_columns import columns, nested_types, run_drawn
from tests.support.lake_values import Mode, check_cell, run_cell, with_ids

from onceflow.core.errors import ConfigError

_SETTINGS: dict[Mode, dict[str, Any]] = {
    "append": {},
    "upsert": {"write_mode": "upsert", "primary_key": ("id",)},
}
_TYPES = st.lists(nested_types(2), min_size=1, max_size=4)


def _open_job(kind: type[LakeJob], directory: Path, rows: pa.RecordBatch, mode: Mode) -> LakeJob:
    job = kind(directory, rows.schema, **_SETTINGS[mode])
    return job.open()


def _find_refused(rows: pa.RecordBatch, error: ConfigError) -> str:
    named = [name for name in rows.schema.names[1:] if repr(name) in str(error)]
    assert named, f"no column is named by: {error}"
    return named[0]


def _check_columns(
    kind: type[LakeJob], directories: Iterator[Path], mode: Mode, drawn: dict[str, pa.Array]
) -> None:
    """Write `drawn` without the columns that the sink refuses, and read it."""
    while drawn:
        rows = with_ids(drawn)
        try:
            job = _open_job(kind, next(directories), rows, mode)
        except ConfigError as error:
            drawn = {name: one for name, one in drawn.items() if name != _find_refused(rows, error)}
            continue
        check_cell(run_cell(job, rows, mode), rows)
        return


@pytest.mark.parametrize("examples", [4, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [IcebergJob, DeltaJob], ids=["iceberg", "delta"])
@pytest.mark.timeout(900)
def test_drawn_values_come_back_as_they_were_or_are_refused_by_name(
    kind: type[LakeJob], examples: int, tmp_path: Path
) -> None:
    def make_directories() -> Iterator[Path]:
        number = 0
        while True:
            directory = tmp_path / str(number)
            directory.mkdir()
            yield directory
            number += 1

    directories = make_directories()

    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        types = data.draw(_TYPES)
        count = data.draw(st.integers(1, 4))
        drawn = {f"c{at}": data.draw(columns(one, count)) for at, one in enumerate(types)}
        _check_columns(kind, directories, data.draw(st.sampled_from(list(_SETTINGS))), drawn)

    run_drawn(check, examples)
