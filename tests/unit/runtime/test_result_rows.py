"""Records become rows as they are when they are returned, or are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from onceflow.core.errors import UserFunctionError
from onceflow.core.plan.functions import OutputTag, Record
from onceflow.core.runtime.dataflow.function_context import SideBuffer
from onceflow.core.runtime.dataflow.result_rows import ResultRows

SCHEMA = pa.schema([("id", pa.int64()), ("note", pa.string())])
NESTED = pa.schema(
    [
        ("tags", pa.list_(pa.string())),
        ("sub", pa.struct([("n", pa.list_(pa.int64()))])),
        ("raw", pa.binary()),
    ]
)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"id": 1}, r"a record without column 'note'.*it is record \{'id': 1\}"),
        (
            {"id": "one", "note": ""},
            r"column 'id' that does not fit int64.*'id': 'one'",
        ),
        ({"id": 99.99, "note": ""}, r"column 'id' that does not fit int64: 99.99 has a fraction"),
        (
            {"id": 1, "note": "", "x": 1},
            r"a record with 'x', but .* only the columns id, note",
        ),
        (None, r"a NoneType instead of a record"),
        ("ab", r"a str instead of a record"),
    ],
)
def test_a_result_that_is_no_record_of_the_schema_is_shown(record: Any, problem: str) -> None:
    results = ResultRows("step", SCHEMA)
    results.take({"id": 1, "note": "n"})
    with pytest.raises(UserFunctionError, match=problem) as raised:
        for one in [record]:
            results.take_record(one)
        results.batch()
    assert raised.value.fingerprint


def test_a_result_that_lacks_a_column_in_a_later_piece_is_told_with_it() -> None:
    results = ResultRows("step", SCHEMA)
    pieces: list[Record] = [{"id": 1, "note": "a"}, {"id": 2}]
    with pytest.raises(UserFunctionError, match=r"record without column 'note'.*\{'id': 2\}"):
        results.batch_of_pieces(map(results.take, pieces))


def test_a_record_that_changes_after_it_was_taken_is_kept_as_it_was() -> None:
    results = ResultRows("step", NESTED)
    numbers, raw = [1], bytearray(b"a")
    record: Record = {"tags": ["a"], "sub": {"n": numbers}, "raw": raw}
    expected: list[Record] = []
    for number in range(3):
        results.take_record(record)
        tags = [*"abcd"[: number + 1]]
        expected.append({"tags": tags, "sub": {"n": list(numbers)}, "raw": bytes(raw)})
        record["tags"].append("bcd"[number])
        numbers.append(number)
        raw += b"!"
    assert results.batch().to_pylist() == expected
    assert results.count == 0


@pytest.mark.parametrize(
    "kind",
    [
        pa.binary(), pa.large_binary(), pa.binary(2), pa.binary_view(), pa.string(),
        pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.binary()),
        pa.dictionary(pa.int32(), pa.string()), pa.list_(pa.int64()), pa.list_(pa.int64(), 2),
        pa.list_view(pa.uint8()),
    ],
    ids=str,
)  # fmt: skip
def test_bytes_that_change_after_they_were_yielded_are_kept_in_a_column_of_any_type(
    kind: pa.DataType,
) -> None:
    results = ResultRows("step", pa.schema([("raw", kind)]))
    raw = list(b"aa") if pa.types.is_nested(kind) else bytearray(b"aa")

    def records() -> Iterator[Record]:
        for text in (b"aa", b"bb", b"cc"):
            raw[:] = text
            yield {"raw": raw}

    results.take(records())
    expected = [list(one) if pa.types.is_nested(kind) else one for one in (b"aa", b"bb", b"cc")]
    assert results.batch().column("raw").equals(pa.array(expected, kind))


def test_a_record_that_changes_after_it_was_emitted_to_a_side_output_is_kept_as_it_was() -> None:
    buffer = SideBuffer("step", OutputTag("late", SCHEMA))
    record: Record = {"id": 0, "note": "n"}
    for number in range(3):
        record["id"] = number
        buffer.emit(record)
    batch = buffer.take_batch()
    assert batch is not None
    assert batch.column("id").to_pylist() == [0, 1, 2]
    assert buffer.take_batch() is None
