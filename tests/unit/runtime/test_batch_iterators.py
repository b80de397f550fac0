"""Tests that functions of iterators take turns with their operator."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from onceflow.core.errors import UserFunctionError
from onceflow.core.plan.functions import takes_iterator
from onceflow.core.runtime.dataflow.batch_iterators import (
    ArrowFunction,
    BatchIteratorCalls,
    PandasFunction,
)

pd: Any = pytest.importorskip("pandas")
SCHEMA = pa.schema([("id", pa.int64())])


def batch(*ids: int) -> pa.RecordBatch:
    return pa.record_batch([list(ids)], schema=SCHEMA)


def calls_of(function: Any) -> BatchIteratorCalls:
    return BatchIteratorCalls("step", ArrowFunction("step", function, SCHEMA))


def ids(batches: Iterable[pa.RecordBatch]) -> list[list[int]]:
    return [one["id"].to_pylist() for one in batches]


def test_what_is_held_back_comes_out_before_the_barrier_and_a_new_call_follows() -> None:
    begun: list[str] = []

    def one_behind(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begun.append(threading.current_thread().name)
        last = None
        for one in batches:
            if last is not None:
                yield last
            last = one
        assert last is not None
        yield last

    calls = calls_of(one_behind)
    assert ids(calls.finish()) == []
    assert ids(calls.feed(batch(1))) == []
    assert ids(calls.feed(batch(2))) == [[1]]
    assert ids(calls.finish()) == [[2]]
    assert ids(calls.finish()) == []
    assert ids(calls.feed(batch(3))) == []
    assert ids(calls.finish()) == [[3]]
    calls.close()
    # Always the same thread, also of another call.
    assert begun == ["function of step"] * 2


def test_a_function_that_makes_many_batches_of_one_waits_for_each_to_be_taken() -> None:
    made: list[int] = []

    def expand(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            for number in range(100):
                made.append(number)
                yield batch(number)

    calls = calls_of(expand)
    results = calls.feed(batch(0))
    assert ids([next(results), next(results)]) == [[0], [1]]
    assert len(made) == 2
    calls.close()


def test_a_call_that_is_given_up_closes_the_function() -> None:
    cleaned = threading.Event()

    def function(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        finally:
            cleaned.set()

    calls = calls_of(function)
    assert ids(calls.feed(batch(1))) == [[1]]
    calls.close()
    calls.close()
    assert cleaned.is_set()
    assert "function of step" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("at", ["call", "first", "end"])
def test_what_a_function_raises_anywhere_reaches_the_operator(at: str) -> None:
    def function(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if at == "call":
            raise ValueError(at)
        for one in batches:
            if at == "first":
                raise ValueError(at)
            yield one
        raise ValueError(at)

    calls = calls_of(function)
    with pytest.raises(UserFunctionError, match=f"'step' failed: ValueError: {at}; at .*\\.py:"):
        ids([*calls.feed(batch(1)), *calls.finish()])
    calls.close()


def test_a_function_that_leaves_batches_is_refused_and_so_is_what_is_no_batch() -> None:
    calls = calls_of(_first)
    with pytest.raises(UserFunctionError, match="before it had read every batch"):
        ids(calls.feed(batch(1)))
    calls.close()
    calls = calls_of(_lists)
    with pytest.raises(UserFunctionError, match="returned list, but it must return"):
        ids(calls.feed(batch(1)))
    calls.close()


def test_results_of_pandas_go_by_name_or_by_place() -> None:
    schema = pa.schema([("id", pa.int64()), ("note", pa.string())])

    def made_of(frame: Any) -> list[pa.RecordBatch]:
        def function(frames: Iterator[Any]) -> Iterator[Any]:
            for _ in frames:
                yield frame

        calls = BatchIteratorCalls("step", PandasFunction("step", function, schema))
        try:
            return [*calls.feed(batch(1)), *calls.finish()]
        finally:
            calls.close()

    rows = [{"id": 7, "note": "a"}, {"id": 8, "note": None}]
    by_name = pd.DataFrame({"note": ["a", None], "id": [7, 8]})
    assert [one.to_pylist() for one in made_of(by_name)] == [rows]
    by_place = pd.DataFrame([[7, "a"], [8, None]])
    assert [one.to_pylist() for one in made_of(by_place)] == [rows]
    with pytest.raises(UserFunctionError, match=r"columns \['id', 'other'\], but its schema has"):
        made_of(pd.DataFrame({"id": [1], "other": [2]}))
    with pytest.raises(UserFunctionError, match="column 'id' that do not fit int64"):
        made_of(pd.DataFrame({"id": ["x"], "note": ["y"]}))


NAN = float("nan")
EAST = timezone(timedelta(hours=5))
MISSING: list[tuple[pa.DataType, list[Any]]] = [
    (pa.float64(), [1.5, None, NAN]),
    (pa.float64(), [1.5, NAN]),
    (pa.float32(), [1.5, None, NAN]),
    (pa.float16(), [1.5, None, NAN]),
    (pa.list_(pa.float64()), [[1.0, None, NAN], None, [], [2.0]]),
    (pa.list_(pa.list_(pa.float64())), [[[None, NAN], None], None]),
    (pa.list_(pa.float64(), 2), [[None, NAN], None]),
    (pa.struct([("a", pa.list_(pa.float64())), ("b", pa.float64())]), [{"a": [None], "b": NAN}]),
    (pa.map_(pa.string(), pa.list_(pa.float64())), [[("k", [None, NAN])], None]),
    (pa.list_(pa.int64()), [[2**60 + 1, None]]),
    (pa.list_(pa.timestamp("us")), [[datetime(1, 1, 1), None]]),
    (pa.list_(pa.timestamp("us", "UTC")), [[datetime(2020, 1, 1, tzinfo=EAST), None]]),
    (pa.list_(pa.duration("us")), [[timedelta(1), None]]),
]


@pytest.mark.parametrize(("kind", "values"), MISSING, ids=lambda one: repr(one)[:60])
def test_pandas_returns_nulls_and_nan_as_what_they_were(
    kind: pa.DataType, values: list[Any]
) -> None:
    given = pa.record_batch({"value": pa.array(values, kind)})

    def copy(frames: Iterator[Any]) -> Iterator[Any]:
        return (frame.copy() for frame in frames)

    (made,) = PandasFunction("step", copy, given.schema).call(iter([given]))
    # As text: NaN equals nothing.
    assert repr(made.to_pylist()) == repr(given.to_pylist())
    assert made.schema == given.schema


def test_pandas_gets_the_values_of_runs_as_they_are() -> None:
    runs = [pc.run_end_encode(pa.array(values)) for values in ([2**60 + 1, None], ["a", "a"])]
    given = pa.record_batch(runs, names=["id", "note"])
    frames: list[Any] = []

    def keep(batches: Iterator[Any]) -> Iterator[Any]:
        for frame in batches:
            frames.append(frame)
            yield frame

    (made,) = PandasFunction("step", keep, given.schema).call(iter([given]))
    assert (made.to_pylist(), made.schema) == (given.to_pylist(), given.schema)
    assert frames[0]["id"][0] == 2**60 + 1


@pytest.mark.parametrize(
    "column",
    [
        pa.UnionArray.from_sparse(pa.array([0, 0], pa.int8()), [pa.array([1, 2])]),
        pa.array([0, 1], pa.time64("ns")),
    ],
    ids=lambda one: str(one.type),
)
def test_a_column_that_pandas_does_not_have_is_named(column: pa.Array) -> None:
    given = pa.record_batch({"id": pa.array([1, 2]), "odd": column})
    function = PandasFunction("step", iter, given.schema)
    with pytest.raises(UserFunctionError, match=r"'step': .*column 'odd' of .*by sql\(\)"):
        list(function.call(iter([given])))


def test_pandas_gets_plain_floats_where_nothing_is_missing() -> None:
    given = pa.record_batch({"value": pa.array([1.5]), "list": pa.array([[1.5]])})
    frames: list[Any] = []

    def keep(batches: Iterator[Any]) -> Iterator[Any]:
        for frame in batches:
            frames.append(frame)
            yield frame

    list(PandasFunction("step", keep, given.schema).call(iter([given])))
    assert str(frames[0]["value"].dtype) == "float64"
    assert str(frames[0]["list"][0].dtype) == "float64"


def _first(batches: Iterator[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return [next(batches)]


def _lists(batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
    for _ in batches:
        yield []


def _yields(batches: Any) -> Any:
    yield from batches


def _says_what_it_takes(batches: Iterator[pa.RecordBatch]) -> Any:
    return batches


def _takes_one(one: pa.RecordBatch) -> pa.RecordBatch:
    return one


class _Callable:
    def __call__(self, batches: Any) -> Any:
        yield from batches


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_yields, True),
        (_says_what_it_takes, True),
        (functools.partial(_yields), True),
        (_Callable(), True),
        (_Callable().__call__, True),
        (_takes_one, False),
        (len, False),
    ],
)
def test_functions_of_iterators_are_known_by_yield_or_annotation(
    function: Any, expected: bool
) -> None:
    assert takes_iterator(function) is expected
