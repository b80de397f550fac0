"""A writer of a lake table refuses rows only for columns that the table still has."""

from __future__ import annotations

import pyarrow as pa
import pytest

from onceflow.core.errors import BadRow, ConfigError, SinkError
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.bad_rows import BadRows
from onceflow.sinks.lake.writer import RefusedRows, TableColumns

_SCHEMA = pa.schema([("id", pa.int64())])
_COLUMNS = TableColumns("t", ["id"], ["id"], _SCHEMA, _SCHEMA)
_NULL = pa.RecordBatch.from_pylist([{"id": None}], schema=_SCHEMA)


class _Reader:
    def __init__(self) -> None:
        self.columns: TableColumns | ConfigError = _COLUMNS
        self.reads = 0

    def __call__(self) -> TableColumns:
        self.reads += 1
        if isinstance(self.columns, ConfigError):
            raise self.columns
        return self.columns


def _refuse(policy: OnBadRow) -> tuple[RefusedRows, _Reader]:
    reader = _Reader()
    return RefusedRows(BadRows(policy, _SCHEMA), _COLUMNS, reader), reader


def test_the_columns_are_read_only_for_checkpoints_that_refuse_rows() -> None:
    refused, reader = _refuse(OnBadRow.DROP)
    refused.check_checkpoint()
    assert reader.reads == 0
    for takes in (False, True):
        _COLUMNS.convert(_NULL, refused.bad_rows)
        if takes:
            assert refused.take()
        refused.check_checkpoint()
        refused.take()
    assert reader.reads == 2


def test_a_table_that_cannot_be_read_again_is_not_called_changed() -> None:
    refused, reader = _refuse(OnBadRow.FAIL)
    reader.columns = ConfigError("the secret is not in /run/token")
    message = "cannot be read, .*: the secret is not in"
    with pytest.raises(SinkError, match=message) as error, refused.check_failure():
        _COLUMNS.convert(_NULL, refused.bad_rows)
    assert "changed under the job" not in str(error.value)


def test_a_bad_row_of_an_unchanged_table_stays_one() -> None:
    refused, _ = _refuse(OnBadRow.FAIL)
    with pytest.raises(BadRow), refused.check_failure():
        _COLUMNS.convert(_NULL, refused.bad_rows)
