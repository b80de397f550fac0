"""Compiled functions at run time: a kernel over the rows of a batch, and Python as a fallback.

The states of a batch's keys are read and written once per batch, as for a function of batches. The
kernel changes copies of the states. If it meets a value that it cannot compute, such as an integer
beyond 64 bits, Python runs the function again on the whole batch, from the same states. An error is
then Python's own, with its record.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.arrow.exact_arrays import array_of
from onceflow.core.arrow.instants import rows_beyond_python
from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.compiled import StateColumn, load_kernel
from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.plan.compiled_function import (
    BOOLEAN,
    FLOAT,
    INTEGER,
    Kind,
    dtype_of,
    kind_of_value,
)
from onceflow.core.plan.work import ProcessKeyed
from onceflow.core.runtime.dataflow import user_functions
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.function_operators import SnapshottedOperator, apply_keyed
from onceflow.core.state import (
    BatchValueState,
    KeyedBatchStates,
    KeyedStateStore,
    ValueState,
    ValueStateDescriptor,
)
from onceflow.core.state.states.operator_state import OperatorStateStore

Array: TypeAlias = npt.NDArray[Any]

UNCOMPILED_BATCHES = "uncompiled_batches"
"""The name of the function's counter of batches that ran as Python."""

_ARROW_TYPES = {INTEGER: pa.int64(), FLOAT: pa.float64(), BOOLEAN: pa.bool_()}

_log = logging.getLogger("onceflow.compiled")


class CompiledProcessor(SnapshottedOperator):
    """An operator that applies a keyed function by its kernel."""

    def __init__(
        self,
        uid: str,
        work: ProcessKeyed,
        store: KeyedStateStore,
        states: OperatorStateStore,
        input_schema: pa.Schema,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid, work.function, store, states, schema)
        assert work.compiled is not None
        self._program = work.compiled
        self._kernel = load_kernel(work.compiled)
        self._process = work.function.process
        self._on_end = work.function.on_end
        self._of_keys = KeyedBatchStates(store, work.key, input_schema)
        self._keys = BatchKeys(self._of_keys)
        user_functions.call_user(uid, work.function.open, self._keys)
        self._of_keys.finish_open()
        self._states_by_column = [self._keys.state(column) for column in self._program.states]
        self._constants = [self._constant(*constant) for constant in self._program.constants]
        self._uncompiled = self.function_metrics.counter(UNCOMPILED_BATCHES)
        self._has_warned = False
        self.dropped = store.finish_open() + states.finish_open()

    def process(self, batch: Batch) -> None:
        """Emit the function's results for each record, in the order of the records."""
        rows = batch.rows
        if not rows.num_rows:
            return
        try:
            keyed = self._of_keys.begin(rows, batch.hashes)
        except BadStateValue as error:
            raise user_functions.user_error(self.uid, error) from error
        # The number of each row's key within the batch. The kernel processes rows in their order,
        # because a later row may read a state that an earlier row has set.
        numbers = keyed.in_row_order(keyed.spread(np.arange(keyed.key_count)))
        self._keys.load()
        try:
            made = self._run_kernel(rows, numbers)
        except (ArithmeticError, pa.ArrowInvalid) as error:
            made = self._run_python(rows, numbers, error)
        self._keys.store()
        self._of_keys.end()
        self.emit(made)

    def end_input(self) -> None:
        """Emit the function's last records."""
        user_functions.call_user(self.uid, lambda: self._results.take(self._on_end()))
        self.emit(self._results.batch())

    def _run_kernel(self, rows: pa.RecordBatch, numbers: Array) -> pa.RecordBatch:
        """Return the results that the kernel computes.

        Raises:
            ArithmeticError, ArrowInvalid: The kernel cannot compute Python's result for these rows.
        """
        program = self._program
        columns = [_to_kernel(rows.column(name), kind) for name, kind in program.columns]
        # The kernel cannot grow arrays, so allocate space for the largest possible result.
        room = rows.num_rows * program.results_max
        result_rows = np.empty(room, np.int64)
        computed = [
            None if output.passed_on is not None else np.empty(room, dtype_of(output.kind))
            for output in program.outputs
        ]
        copies = [state.copies() for state in self._states_by_column]
        count = self._kernel(
            rows.num_rows,
            numbers,
            *columns,
            *self._constants,
            *(array for arrays in copies for array in arrays),
            result_rows,
            *(values for values in computed if values is not None),
        )
        made = self._make_batch(rows, result_rows[:count], computed)
        # Last of all: a failure above has changed only copies, so Python can run the same batch.
        for state, (values, has_value) in zip(self._states_by_column, copies, strict=True):
            state.take(values, has_value)
        return made

    def _make_batch(
        self, rows: pa.RecordBatch, result_rows: Array, computed: list[Array | None]
    ) -> pa.RecordBatch:
        count = len(result_rows)
        each_once = count == rows.num_rows and np.array_equal(result_rows, np.arange(count))
        taken = None if each_once else pa.array(result_rows)
        arrays: list[pa.Array] = []
        for column, values, field in zip(
            self._program.outputs, computed, self._results.schema, strict=True
        ):
            if values is not None:
                arrays.append(_from_kernel(values[:count], field.type))
            else:
                passed_on = rows.column(cast("str", column.passed_on))
                arrays.append(passed_on if taken is None else passed_on.take(taken))
        return pa.record_batch(arrays, schema=self._results.schema)

    def _run_python(
        self, rows: pa.RecordBatch, numbers: Array, reason: Exception
    ) -> pa.RecordBatch:
        """Return the results that Python computes.

        Raises:
            UserFunctionError: The function has raised, or a state cannot hold a value.
        """
        self._uncompiled.add()
        # Warn once per operator: a column with a null in every batch would fill the log.
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "operator %r runs a batch as Python, because its kernel cannot compute the"
                " result: %s; the metric %s counts such batches",
                self.uid,
                str(reason) or "integers leave 64 bits, or the function raises",
                UNCOMPILED_BATCHES,
            )
        self._keys.begin_python()
        step = partial(
            apply_keyed,
            self._keys.set_current,
            self._process,
            self._results,
            iter(numbers.tolist()),
        )
        pieces = user_functions.call_user_on_records(
            self.uid, step, user_functions.BatchRecords(rows)
        )
        made = self._results.batch_of_pieces(pieces)
        self._keys.end_python()
        return made

    def _constant(self, name: str, kind: Kind) -> Any:
        """Return the kernel's value of an attribute, or of a state's default."""
        if name.startswith("="):
            (state,) = (
                candidate for candidate in self._program.states if candidate.attribute == name[1:]
            )
            return self._keys.state(state).default
        value = getattr(self._function, name)
        if kind_of_value(value) != kind:
            raise ConfigError(
                f"operator {self.uid!r}: attribute {name} is {value!r} in a slot, but was"
                f" compiled as {kind}. Give it the same type in open() everywhere"
            )
        return value


class BatchKeys:
    """The states of a compiled function, for all keys of the current batch."""

    def __init__(self, of_keys: KeyedBatchStates) -> None:
        self._of_keys = of_keys
        self._states: dict[str, ColumnState] = {}
        self.current = -1
        """The number of the key of the record that Python processes; -1 if there is none."""

    def value_state(self, descriptor: ValueStateDescriptor[Any]) -> ColumnState:
        """Return the state with one value per key."""
        if descriptor.name not in self._states:
            # Without the default, so that keys without a value stay so.
            bare = ValueStateDescriptor[Any](descriptor.name, descriptor.type)
            kept = self._of_keys.value_state(bare)
            self._states[descriptor.name] = ColumnState(self, kept, descriptor)
        return self._states[descriptor.name]

    def state(self, column: StateColumn) -> ColumnState:
        """Return the state of a column of the program.

        Raises:
            ConfigError: `open` has not asked for the state in this slot.
        """
        state = self._states.get(column.descriptor.name)
        if state is None or state.descriptor != column.descriptor:
            raise ConfigError(
                f"open() requested {column.descriptor} where the pipeline was built, but not in a"
                " slot. Request the same states everywhere"
            )
        return state

    def load(self) -> None:
        """Read the values of the batch's keys."""
        for state in self._states.values():
            state.load()

    def store(self) -> None:
        """Write the values of the batch's keys."""
        for state in self._states.values():
            state.store()

    def set_current(self, number: int) -> None:
        """Select the key, by its number, whose values the states read and write."""
        self.current = number

    def begin_python(self) -> None:
        """Prepare the states for Python, which uses one key at a time."""
        for state in self._states.values():
            state.begin_python()

    def end_python(self) -> None:
        """Take the states' values back as columns after Python has run."""
        self.current = -1
        for state in self._states.values():
            state.end_python()


class ColumnState(ValueState[Any]):
    """A value of each key of the current batch: an array for the kernel, a list for Python."""

    def __init__(
        self, keys: BatchKeys, kept: BatchValueState, descriptor: ValueStateDescriptor[Any]
    ) -> None:
        self._keys = keys
        self._kept = kept
        self.descriptor = descriptor
        self._python_type: type[Any] = type(cast("Any", descriptor.default))
        declared = descriptor.type
        self._type = declared if isinstance(declared, pa.DataType) else _to_arrow_type(declared)
        default = array_of([descriptor.default], self._type)
        is_time = pa.types.is_timestamp(self._type)
        self.default: Any = (default.view(pa.int64()) if is_time else default)[0].as_py()
        """The default in the kernel's representation."""
        self._column: pa.Array = pa.array([], self._type)
        self._values: list[Any] = []

    def load(self) -> None:
        """Read the keys' values."""
        self._column = self._kept.get_many()

    def store(self) -> None:
        """Write the keys' values."""
        self._kept.put_many(self._column)

    def copies(self) -> tuple[Array, Array]:
        """Return copies of the keys' values, with defaults, and a mask of keys with a value."""
        has_value = self._column.is_valid().to_numpy(zero_copy_only=False)
        column = self._column.fill_null(pa.scalar(self.descriptor.default, self._type))
        if pa.types.is_timestamp(self._type):
            column = column.view(pa.int64())
        values = column.to_numpy(zero_copy_only=False)
        # Copy, because Arrow's arrays are read-only and the kernel writes into these.
        return np.array(values), np.array(has_value)

    def take(self, values: Array, has_value: Array) -> None:
        """Take the arrays from `copies` back after the kernel has changed them."""
        column = pa.array(values, mask=~has_value)
        self._column = column if column.type == self._type else column.view(self._type)

    def begin_python(self) -> None:
        """Prepare the values for Python, which uses one key at a time."""
        self._values = self._column.to_pylist()

    def end_python(self) -> None:
        """Convert the values of the keys back to a column."""
        self._column = array_of(self._values, self._type)
        self._values = []

    def get(self) -> Any:
        """Return the value of the current key, or the default."""
        value = self._values[self._current()]
        return self.descriptor.default if value is None else value

    def set(self, value: Any) -> None:
        """Set the value of the current key."""
        if value is not None:
            # Compare exact classes: for Python True is an int, and the kernel of the next batch
            # would read it as 1.
            is_integer = self._type == pa.int64()
            if type(value) is not self._python_type or (
                is_integer and kind_of_value(value) != INTEGER
            ):
                raise BadStateValue(
                    f"state {self.descriptor.name!r} of a compiled function holds {self._type},"
                    f" but is set to {value!r:.80}"
                )
        self._values[self._current()] = value

    def clear(self) -> None:
        """Delete the value of the current key."""
        self._values[self._current()] = None

    def _current(self) -> int:
        if self._keys.current < 0:
            raise BadStateValue(
                f"state {self.descriptor.name!r} is kept by key, but was used where no key is"
                " set. Use it only while a record is processed"
            )
        return self._keys.current


def _to_arrow_type(python_type: Any) -> pa.DataType:
    return {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}[python_type]


def _to_kernel(column: pa.Array, kind: Kind) -> Array:
    """Return a column's values in the kernel's representation.

    Raises:
        ArithmeticError, ArrowInvalid: The column holds a null, or a value that the kernel lacks.
    """
    if column.null_count:
        raise ArithmeticError("a column that the function reads holds nulls")
    if pa.types.is_timestamp(column.type):
        if rows_beyond_python(column):
            raise ArithmeticError("a time is outside the years 1 to 9999 of Python")
        column = column.view(pa.int64())
    column = cast_rows(column, _ARROW_TYPES.get(kind, pa.int64()))
    values = column.to_numpy(zero_copy_only=False)
    # Contiguous and aligned: compiled code reads by address, and a slice of an Arrow column may
    # be neither.
    return np.require(values, dtype_of(kind), ["C", "A"])


def _from_kernel(values: Array, arrow_type: pa.DataType) -> pa.Array:
    """Return the kernel's values as a column.

    Raises:
        ArrowInvalid: An integer does not fit the type.
    """
    column = pa.array(values)
    if column.type == arrow_type:
        return column
    if pa.types.is_timestamp(arrow_type):
        return column.view(arrow_type)
    return cast_rows(column, arrow_type)
