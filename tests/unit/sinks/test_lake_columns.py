"""Rows as the columns of a lake table, and those that it can never take."""

from __future__ import annotations

import pyarrow as pa
import pytest

from onceflow.core.spi import OnBadRow
from onceflow.core.spi.bad_rows import BadRows
from onceflow.sinks.lake.writer import TableColumns

_FINE, _COARSE = pa.timestamp("ns"), pa.timestamp("us")


@pytest.mark.parametrize(
    ("given", "written", "wrapping"),
    [
        (_FINE, _COARSE, "value"),
        (pa.list_(_FINE), pa.list_(_COARSE), "list"),
        (pa.struct([("a", _FINE)]), pa.struct([("a", _COARSE)]), "struct"),
        (pa.map_(pa.string(), _FINE), pa.map_(pa.string(), _COARSE), "map"),
    ],
)
def test_a_value_that_the_table_cannot_hold_takes_no_other_row_of_its_batch_with_it(
    given: pa.DataType, written: pa.DataType, wrapping: str
) -> None:
    def wrap(instant: object) -> object:
        return {"value": instant, "list": [instant], "map": [("a", instant)]}.get(
            wrapping, {"a": instant}
        )

    rows = pa.schema([("id", pa.int64()), ("v", given)])
    target = pa.schema([("id", pa.int64()), ("v", written)])
    columns = TableColumns("t", target.names, (), target, rows)
    instants = [wrap(pa.scalar(number, _FINE)) for number in (1000, 1, 2000, 3001, 4000)]
    batch = pa.RecordBatch.from_arrays([pa.array(range(5)), pa.array(instants, given)], schema=rows)
    bad_rows = BadRows(OnBadRow.DEAD_LETTER, rows)
    assert columns.convert(batch, bad_rows).column("id").to_pylist() == [0, 2, 4]
    (rejected,) = bad_rows.take()
    assert len(rejected.reasons) == 2
