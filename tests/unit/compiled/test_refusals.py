"""Tests that a pipeline with a function that cannot be compiled is refused with line and reason."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from onceflow import (
    KeyedFunction,
    MapStateDescriptor,
    Record,
    StateAccess,
    StateTtlConfig,
    ValueStateDescriptor,
)
from onceflow.core.compiled import translate_function
from onceflow.core.errors import ConfigError

SCHEMA = pa.schema([("account", pa.string()), ("amount", pa.int64()), ("rate", pa.float64())])


class Refused(KeyedFunction):
    """Has a state and returns what its input has."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def open(self, state: StateAccess) -> None:
        self._total = state.value_state(ValueStateDescriptor("total", int, default=0))
        self.names = ["a"]


class Loop(Refused):
    def process(self, record: Record) -> Record:
        for _ in range(3):  # reason: loops are not compiled
            self._total.set(1)
        return record


class ComparesText(Refused):
    def process(self, record: Record) -> Record | None:
        return record if record["account"] == "a" else None  # reason: a result is record


class ReadsText(Refused):
    def process(self, record: Record) -> Record | None:
        if record["account"] == "a":  # reason: column 'account' is string
            return None
        return record


class MixesKinds(Refused):
    def process(self, record: Record) -> Record:
        total = 1
        if record["amount"] > 3:
            total = 0.5  # type: ignore[assignment]  # reason: it was an integer before, and is a float here
        self._total.set(int(total))
        return record


class MayBeUnbound(Refused):
    def process(self, record: Record) -> Record:
        if record["amount"] > 3:
            total = 1
        self._total.set(total)  # pyright: ignore[reportPossiblyUnboundVariable]  # reason: has no
        return record


class SetsAFloat(Refused):
    def process(self, record: Record) -> Record:
        self._total.set(record["rate"])  # reason: state 'total' holds an integer, and is set to a f
        return record


class OtherColumns(Refused):
    def process(self, record: Record) -> Record:
        return {"account": record["account"]}  # reason: the schema says account, amount, rate


class NoSuchColumn(Refused):
    def process(self, record: Record) -> Record:
        self._total.set(record["amuont"])  # reason: the record has no column 'amuont'
        return record


class CallsAFunction(Refused):
    def process(self, record: Record) -> Record:
        record["rate"] = round(record["rate"], 2)  # reason: round() is not compiled
        return record


class ChangesItself(Refused):
    def process(self, record: Record) -> Record:
        self.count = 1  # reason: a kernel changes no attribute
        return record


class ReadsAList(Refused):
    def process(self, record: Record) -> Record:
        self._total.set(len(self.names))  # reason: attribute names is not a number
        return record


class KeepsTheRecord(Refused):
    def process(self, record: Record) -> Record:
        other = record  # reason: record cannot be used as a value
        self._total.set(len(other))
        return record


class AndOfNumbers(Refused):
    def process(self, record: Record) -> Record:
        record["amount"] = record["amount"] or 1  # reason: must be of booleans
        return record


class PowerOfIntegers(Refused):
    def process(self, record: Record) -> Record:
        record["amount"] = record["amount"] ** 2  # reason: Pow of an integer and an integer
        return record


@pytest.mark.parametrize(
    "kind",
    [
        Loop, ComparesText, ReadsText, MixesKinds, MayBeUnbound, SetsAFloat, OtherColumns,
        NoSuchColumn, CallsAFunction, ChangesItself, ReadsAList, KeepsTheRecord, AndOfNumbers,
        PowerOfIntegers,
    ],
)  # fmt: skip
def test_a_function_is_refused_with_the_line_and_the_reason(kind: type[Refused]) -> None:
    with open(__file__, encoding="utf-8") as file:  # noqa: PTH123
        lines = file.read().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"class {kind.__name__}("))
    number = next(at for at, line in enumerate(lines) if at > start and "# reason: " in line)
    reason = lines[number].partition("# reason: ")[2]
    with pytest.raises(ConfigError) as raised:
        translate_function(kind(), SCHEMA, SCHEMA)
    text = str(raised.value)
    assert f"{kind.__name__}.process cannot be compiled: {__file__}:{number + 1}: " in text
    assert reason in text


class Opens(Refused):
    """Asks for a state when it opens."""

    def __init__(self, method: str, descriptor: Any) -> None:
        self.method, self.descriptor = method, descriptor

    def open(self, state: StateAccess) -> None:
        getattr(state, self.method)(self.descriptor)

    def process(self, record: Record) -> Record:
        return record


@pytest.mark.parametrize(
    ("method", "descriptor", "reason"),
    [
        ("value_state", ValueStateDescriptor[str]("s", str), "is of type <class 'str'>"),
        ("value_state", ValueStateDescriptor[int]("s", int), "has no default"),
        ("value_state", ValueStateDescriptor[float]("s", float, default=0), "which is not float"),
        ("value_state", ValueStateDescriptor[int]("s", int, default=2**63), "which is not int"),
        (
            "value_state",
            ValueStateDescriptor[int]("s", int, default=0, ttl=StateTtlConfig("1 h")),
            "has a time to live",
        ),
        ("map_state", MapStateDescriptor[int, int]("s", int, int), "open() asks for map_state"),
    ],
)
def test_a_state_that_a_kernel_does_not_have_is_refused_by_name(
    method: str, descriptor: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match="cannot be compiled") as raised:
        translate_function(Opens(method, descriptor), SCHEMA, SCHEMA)
    assert reason in str(raised.value)


def test_text_that_is_not_that_of_the_code_is_refused(tmp_path: Any) -> None:
    """A file that was changed after its import would be translated to something else."""
    file = tmp_path / "changed.py"
    text = "class Changed(Refused):\n    def process(self, record):\n        {}\n"
    body = "record['amount'] = {} - {}; return record"
    a, b = "record['amount']", "self._total.get()"
    file.write_text(text.format(body.format(a, b)))
    names: dict[str, Any] = {"Refused": Refused, "__name__": "changed"}
    exec(compile(file.read_text(), str(file), "exec"), names)
    translate_function(names["Changed"](), SCHEMA, SCHEMA)
    file.write_text(text.format(body.format(b, a)))
    with pytest.raises(ConfigError, match="was its file changed"):
        translate_function(names["Changed"](), SCHEMA, SCHEMA)
