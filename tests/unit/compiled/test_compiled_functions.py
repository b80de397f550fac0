"""A compiled function does what the same function does as Python: results, states and errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from benchmarks.keyed_balance import KeyedBalance
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.compiled.keyed_operators import run_operator

from onceflow import KeyedFunction, Record, RocksDBBackend, StateAccess, ValueStateDescriptor

pytest.importorskip("numba")

TIME = pa.timestamp("us")
EPOCH = datetime(1970, 1, 1)
FEE = 3
SCHEMA = pa.schema(
    [
        ("account", pa.string()),
        ("amount", pa.int64()),
        ("factor", pa.int16()),
        ("rate", pa.float64()),
        ("is_test", pa.bool_()),
        ("at", TIME),
        ("note", pa.string()),
    ]
)


class Rule(KeyedFunction):
    """Has each kind of state and most that is compiled; makes none, one or two records of one."""

    limit = 1_000

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return pa.schema(
            [
                ("account", pa.string()),
                ("note", pa.string()),
                ("total", pa.int64()),
                ("share", pa.float64()),
                ("small", pa.int8()),
                ("is_late", pa.bool_()),
                ("last", TIME),
            ]
        )

    def open(self, state: StateAccess) -> None:
        self._total = state.value_state(ValueStateDescriptor("total", int, default=5))
        self._peak = state.value_state(ValueStateDescriptor("peak", float, default=-math.inf))
        self._seen = state.value_state(ValueStateDescriptor("seen", bool, default=False))
        self._last = state.value_state(ValueStateDescriptor("last", TIME, default=EPOCH))

    def process(self, record: Record) -> Iterator[Record]:
        amount = record["amount"]
        if amount == 13 or (record["is_test"] and not amount):
            return
        if amount == -7:
            self._total.clear()
            self._seen.clear()
        total = self._total.get() + amount * record["factor"] - FEE
        self._total.set(total)
        is_late = record["at"] < self._last.get()
        self._last.set(max(record["at"], self._last.get()))
        peak = max(self._peak.get(), record["rate"], 0.25)
        self._peak.set(peak)
        if peak > total or math.isnan(record["rate"]):
            share = record["rate"] * 2 + amount
        else:
            share = total / amount if abs(amount) > 1 else -peak % 1.5
        yield {
            "account": record["account"],
            "note": record["note"],
            "total": total,
            "share": share,
            "small": total % 100,
            "is_late": is_late,
            "last": self._last.get(),
        }
        if -self.limit < amount <= self.limit and self._seen.get():
            yield {
                "account": record["account"],
                "note": record["note"],
                "total": min(total, amount) // record["factor"],
                "share": float(int(peak)) if math.isfinite(peak) else 0.0,
                "small": amount,
                "is_late": not is_late,
                "last": record["at"],
            }
        self._seen.set(True)


INTEGERS = st.one_of(
    st.sampled_from([0, 1, -1, 13, -7, 2**53 + 1, 2**62, -(2**63), 2**63 - 1]),
    st.integers(-300, 300),
    st.none(),
)
FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e300]),
    st.floats(-1e6, 1e6),
    st.none(),
)
ROWS = st.fixed_dictionaries(
    {
        "account": st.sampled_from("abc"),
        "amount": INTEGERS,
        "factor": st.sampled_from([1, 1, 2, -1, 0, 30_000]),
        "rate": FLOATS,
        "is_test": st.booleans(),
        "at": st.integers(-5, 5).map(lambda days: EPOCH + timedelta(days=days)),
        "note": st.sampled_from(["", "x", None]),
    }
)


@pytest.mark.servers
@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(ROWS, max_size=6), max_size=4))
def test_a_compiled_rule_does_what_it_does_as_python(batches: list[list[dict[str, Any]]]) -> None:
    """Overflow, NaN, nulls, division by zero, no result, several: in any batch, in any order."""
    columns = [pa.RecordBatch.from_pylist(rows, schema=SCHEMA) for rows in batches]
    python = run_operator(Rule(), SCHEMA, columns, compiled=False)
    compiled = run_operator(Rule(), SCHEMA, columns, compiled=True)
    assert compiled.text == python.text
    assert (compiled.error is None) == (python.error is None)
    if python.error is not None and "holds int64, but is set to" not in str(compiled.error):
        assert str(compiled.error).splitlines()[0] == str(python.error).splitlines()[0]


def payments(*amounts: int | None) -> pa.RecordBatch:
    schema = pa.schema([("account", pa.string()), ("amount", pa.int64())])
    return pa.record_batch(
        [["a", "b"] * len(amounts), [x for x in amounts for _ in "ab"]], schema=schema
    )


@pytest.mark.servers
@pytest.mark.parametrize("backend", [None, RocksDBBackend()], ids=["heap", "rocksdb"])
def test_a_batch_beyond_the_kernel_runs_as_python_with_the_same_states(
    backend: RocksDBBackend | None,
) -> None:
    batches = [payments(1, 2), payments(2**62, 3), payments(-(2**62), 4)]
    runs = [
        run_operator(KeyedBalance(), batches[0].schema, batches, compiled=compiled, backend=backend)
        for compiled in (False, True)
    ]
    assert runs[0].text == runs[1].text
    assert runs[1].error is None
    assert runs[1].uncompiled_batches == 0


def test_an_integer_beyond_64_bits_is_an_error_with_its_record_and_never_wraps() -> None:
    batches = [payments(2**63 - 2, 1), payments(1)]
    run = run_operator(KeyedBalance(), batches[0].schema, batches, compiled=True)
    assert [record["balance"] for record in run.records] == [2**63 - 2] * 2 + [2**63 - 1] * 2
    assert run.uncompiled_batches == 1
    text = str(run.error)
    assert "holds int64, but is set to 9223372036854775808" in text
    assert "at record {'account': 'a', 'amount': 1}" in text


def test_a_null_is_what_it_is_to_python() -> None:
    batches = [payments(1), payments(None)]
    run = run_operator(KeyedBalance(), batches[0].schema, batches, compiled=True)
    assert run.uncompiled_batches == 1
    assert "TypeError: unsupported operand type(s) for +" in str(run.error)
    assert "at record {'account': 'a', 'amount': None}" in str(run.error)
