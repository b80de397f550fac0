"""One subtask of a keyed function, as Python and compiled, without a job around it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow import KeyedFunction
from onceflow.core.compiled import CompiledFunction, translate_function
from onceflow.core.errors import UserFunctionError
from onceflow.core.plan.functions import Record
from onceflow.core.plan.work import ProcessKeyed
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.compiled_operator import UNCOMPILED_BATCHES, CompiledProcessor
from onceflow.core.runtime.dataflow.function_operators import KeyedProcessor
from onceflow.core.state import HeapBackend, StateBackend, StateContext
from onceflow.core.state.states.operator_state import OperatorStateStore


@cache
def _translate(kind: type[KeyedFunction], schema: pa.Schema, output: pa.Schema) -> CompiledFunction:
    return translate_function(kind(), schema, output)


class Run:
    """The result of a run over batches: the records, and the error that ended it."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.error: UserFunctionError | None = None
        self.uncompiled_batches = 0

    def take(self, rows: pa.RecordBatch) -> None:
        """Take what the operator emits."""
        self.records += rows.to_pylist()

    @property
    def text(self) -> str:
        """The records, as text that tells NaN, zeros and types apart."""
        return "\n".join(map(repr, self.records))


def run_operator(
    function: KeyedFunction,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    compiled: bool,
    backend: StateBackend | None = None,
) -> Run:
    """Run `function` keyed by the first column of `schema`."""
    key, output = (schema.names[0],), function.output_schema(schema)
    groups = range(128)
    run = Run()
    with tempfile.TemporaryDirectory() as directory:
        context = StateContext("op", 0, groups, 128, Path(directory))
        store = (backend or HeapBackend()).open(context, (), MemoryStorage())
        states = OperatorStateStore(
            "op", subtask=0, parallelism=1, key_groups=groups, max_parallelism=128,
            is_restored=False,
        )  # fmt: skip
        operator: Any
        if compiled:
            work = ProcessKeyed(key, function, _translate(type(function), schema, output))
            operator = CompiledProcessor("op", work, store, states, schema, output)
        else:
            operator = KeyedProcessor("op", ProcessKeyed(key, function), store, states, output)
        operator.emit = run.take
        try:
            for rows in batches:
                operator.process(Batch(rows))
        except UserFunctionError as error:
            run.error = error
        if compiled:
            counter = operator.function_metrics.counter(UNCOMPILED_BATCHES)
            run.uncompiled_batches = int(counter.describe("op", "n").value)
        operator.close()
    return run
