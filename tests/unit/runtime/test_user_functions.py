"""What a function of the user raises is told with its record, wherever batches begin and end."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from onceflow.core.errors import BadRecord, BadStateValue, UserFunctionError
from onceflow.core.functions import Record
from onceflow.core.runtime.dataflow.user_functions import batch_of, call_user, call_user_on_records
from onceflow.core.runtime.driver.slot_pool import slot_error
from onceflow.core.runtime.messages import Failed

SCHEMA = pa.schema([("id", pa.int64()), ("note", pa.string())])


def rows(*ids: int, note: str = "n") -> pa.RecordBatch:
    return pa.record_batch([list(ids), [note] * len(ids)], schema=SCHEMA)


def failure(batch: pa.RecordBatch, error: BaseException, *, at: int = 7) -> UserFunctionError:
    def step(records: Iterator[Record]) -> list[Any]:
        for record in records:
            if record["id"] == at:
                raise error
        return []

    with pytest.raises(UserFunctionError) as raised:
        call_user_on_records("step", step, batch)
    return raised.value


def test_the_record_that_failed_is_named_with_its_place_in_the_batch() -> None:
    text = str(failure(rows(5, 6, 7, 8), ValueError("seven")))
    assert "operator 'step' failed: ValueError: seven; at record {'id': 7, 'note': 'n'}" in text
    assert "row 2 of a batch of 4" in text


def test_the_record_is_named_by_topic_partition_and_offset_where_the_batch_has_them() -> None:
    batch = pa.record_batch(
        {
            "id": pa.array([6, 7]),
            "_topic": pa.array(["payments", "payments"]),
            "_partition": pa.array([0, 3], pa.int32()),
            "_offset": pa.array([10, 41], pa.int64()),
        }
    )
    text = str(failure(batch, ValueError("seven")))
    assert "topic payments, partition 3, offset 41" in text


def test_a_long_record_and_a_long_reason_are_shortened() -> None:
    text = str(failure(rows(7, note="x" * 100_000), ValueError("y" * 100_000)))
    assert "characters" in text
    assert len(text) < 6_000


def test_the_same_record_fails_the_same_way_in_whatever_batch_it_comes() -> None:
    first = failure(rows(5, 6, 7), ValueError("seven"))
    again = failure(rows(7, 8), ValueError("seven, again"))
    assert first.fingerprint == again.fingerprint != ""
    assert failure(rows(7, note="other"), ValueError("seven")).fingerprint != first.fingerprint
    assert failure(rows(7), KeyError("seven")).fingerprint != first.fingerprint


@pytest.mark.parametrize("error", [ConnectionResetError("gone"), TimeoutError("late")])
def test_what_the_network_does_is_no_mistake_of_the_program(error: OSError) -> None:
    assert failure(rows(7), error).fingerprint == ""
    wrapped = RuntimeError("the service failed")
    wrapped.__cause__ = error
    assert failure(rows(7), wrapped).fingerprint == ""
    assert failure(rows(7), FileNotFoundError("model.bin")).fingerprint != ""


def test_a_function_that_exits_the_process_fails_like_any_other() -> None:
    assert "SystemExit: 3" in str(failure(rows(7), SystemExit(3)))


def test_an_error_of_ours_is_passed_on_and_a_bad_value_of_state_gets_its_record() -> None:
    with pytest.raises(BadRecord, match="mine"):
        call_user("step", _raising(BadRecord("mine")))
    assert "'id': 7" in str(failure(rows(7), BadStateValue("no int64")))


def test_an_error_without_a_readable_text_is_told_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert "Mute" in str(failure(rows(7), Mute()))


def test_the_fingerprint_reaches_the_driver() -> None:
    error = failure(rows(7), ValueError("seven"))
    reported = slot_error(Failed.of(0, error))
    assert isinstance(reported, UserFunctionError)
    assert reported.fingerprint == error.fingerprint
    assert pickle.loads(pickle.dumps(error)).fingerprint == error.fingerprint


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"id": 1}, r"a record without column 'note'.*it is record \{'id': 1\}"),
        ({"id": "one", "note": ""}, r"a value for column 'id' that is no int64.*'id': 'one'"),
        (None, r"a NoneType and no record"),
    ],
)
def test_a_result_that_is_no_record_of_the_schema_is_shown(record: Any, problem: str) -> None:
    good: Record = {"id": 1, "note": "n"}
    with pytest.raises(UserFunctionError, match=problem) as raised:
        batch_of([good, record], SCHEMA, "step")
    assert raised.value.fingerprint


def _raising(error: BaseException) -> Any:
    def function() -> None:
        raise error

    return function
