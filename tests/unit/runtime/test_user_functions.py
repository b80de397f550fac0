"""Tests that an error of the user's function names its record, at any batch boundaries."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pyarrow as pa
import pytest
from benchmarks.keyed_balance import KeyedBalance
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow.core.errors import BadRecord, BadStateValue, UserFunctionError
from onceflow.core.plan.functions import Record
from onceflow.core.plan.work import ProcessKeyed
from onceflow.core.protocol.loops.slots import slot_error
from onceflow.core.runtime.dataflow import user_functions
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.function_operators import KeyedProcessor
from onceflow.core.runtime.dataflow.user_functions import (
    BatchRecords,
    call_user,
    call_user_on_records,
)
from onceflow.core.runtime.messages import report_of_failure
from onceflow.core.state import HeapBackend, StateContext
from onceflow.core.state.states.operator_state import OperatorStateStore

PAYMENT = pa.schema([("account", pa.string()), ("amount", pa.int64())])
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
        list(call_user_on_records("step", step, BatchRecords(batch)))
    return raised.value


def test_the_record_that_failed_is_named_with_its_place_in_the_batch() -> None:
    text = str(failure(rows(5, 6, 7, 8), ValueError("seven")))
    assert "operator 'step' failed: ValueError: seven; at record {'id': 7, 'note': 'n'}" in text
    assert "row 2 of a batch of 4" in text


def test_a_record_of_a_later_piece_is_named_with_its_place_in_the_whole_batch() -> None:
    batch = rows(*range(5 * user_functions.RECORDS_AT_ONCE))
    at = 3 * user_functions.RECORDS_AT_ONCE + 17
    text = str(failure(batch, ValueError("late"), at=at))
    assert f"record {{'id': {at}, 'note': 'n'}}" in text
    assert f"row {at} of a batch of {batch.num_rows}" in text


NAMES = ["id", "class", "a 'quoted' \"name\"", "back\\slash\n", "{x}", "__import__('os')", "", "ü"]


@pytest.mark.parametrize("columns", [1, 2, len(NAMES)])
def test_records_hold_what_the_columns_hold_under_any_name(columns: int) -> None:
    names = NAMES[:columns]
    values = [[1, None, 3], ["x", None, ""], [1.5, float("inf"), None], [[1], [], None]]
    arrays = [pa.array(values[place % len(values)]) for place in range(columns)]
    batch = pa.record_batch(arrays, names=names)
    assert list(BatchRecords(batch).pieces()) == [batch.to_pylist()]


@pytest.mark.parametrize("count", [0, 1, 1_023, 1_024, 1_025, 3_000])
def test_results_of_all_pieces_are_one_batch_with_the_state_of_each_records_key(
    count: int, tmp_path: Path
) -> None:
    function = KeyedBalance()
    schema = function.output_schema(PAYMENT)
    work = ProcessKeyed(("account",), function)
    groups = range(128)
    context = StateContext("op", 0, groups, 128, tmp_path)
    store = HeapBackend().open(context, (), MemoryStorage())
    unkeyed = OperatorStateStore(
        "op", subtask=0, parallelism=1, key_groups=groups, max_parallelism=128, is_restored=False
    )
    emitted: list[pa.RecordBatch] = []

    class Kept(KeyedProcessor):
        def emit(self, rows: pa.RecordBatch) -> None:
            emitted.append(rows)

    operator = Kept("op", work, store, unkeyed, schema)
    accounts = [f"account-{number % 7}" for number in range(count)]
    batch = pa.record_batch([accounts, list(range(count))], schema=PAYMENT)
    expected: list[Record] = []
    totals: dict[str, tuple[int, int]] = {}
    for _ in range(2):
        operator.process(Batch(batch))
        for record in batch.to_pylist():
            balance, n = totals.get(record["account"], (0, 0))
            totals[record["account"]] = balance + record["amount"], n + 1
            expected.append({**record, "balance": balance + record["amount"], "n": n + 1})
    assert [made.num_rows for made in emitted] == [count, count]
    assert [record for made in emitted for record in made.to_pylist()] == expected


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
    for lasting in (FileNotFoundError("model.bin"), MemoryError()):
        assert failure(rows(7), lasting).fingerprint != ""


def test_the_status_of_an_answer_says_if_a_mistake_is_the_programs() -> None:
    for status, is_mistake in ((400, True), (429, False), (503, False)):
        error = HTTPError("http://service", status, "no", Message(), None)
        assert (failure(rows(7), error).fingerprint != "") == is_mistake


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
    reported = slot_error(report_of_failure(0, error))
    assert isinstance(reported, UserFunctionError)
    assert reported.fingerprint == error.fingerprint
    assert pickle.loads(pickle.dumps(error)).fingerprint == error.fingerprint


def _raising(error: BaseException) -> Any:
    def function() -> None:
        raise error

    return function


IN_A_STRUCT = pa.struct([("at", pa.time64("ns"))])
TIMES: list[tuple[pa.DataType, Callable[[int], Any]]] = [
    (pa.time64("ns"), lambda ticks: ticks),
    (pa.list_(pa.time64("ns")), lambda ticks: [None, ticks]),
    (IN_A_STRUCT, lambda ticks: {"at": ticks}),
]


@pytest.mark.parametrize(("kind", "holder"), TIMES, ids=["alone", "in a list", "in a struct"])
def test_a_time_of_day_that_python_would_cut_off_is_refused_with_its_record(
    kind: pa.DataType, holder: Callable[[int], Any]
) -> None:
    fine = pa.record_batch({"at": pa.array([holder(5_000), None], kind)})
    assert [record for piece in BatchRecords(fine).pieces() for record in piece] == fine.to_pylist()
    finer = pa.record_batch({"at": pa.array([holder(5_000), None, holder(5_001)], kind)})
    with pytest.raises(UserFunctionError, match=r"no value for column 'at' .*5001 ns .* is finer"):
        BatchRecords(finer)
