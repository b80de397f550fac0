"""Collects the results of record functions as rows of a schema, and builds record batches.

The values of a record are copied when it is returned, yielded or emitted, so the function may
change the record afterwards. `exact_array` converts the values to columns without loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias, cast

import pyarrow as pa

from onceflow.core.arrow.exact_arrays import InexactValue, exact_array
from onceflow.core.arrow.kinds import holds, is_bytes, is_list, is_text
from onceflow.core.errors import UserFunctionError
from onceflow.core.plan.functions import Record, copy_value
from onceflow.core.runtime.dataflow.user_functions import result_error

Results: TypeAlias = Record | Iterable[Record] | None

_TAKE_RECORD = """
def make(extend, refuse, copy_value, kinds, copy_pairs):
    def take_record(record):
        try:
            if len(record) == {width}:
                extend(({values}))
                return
        except (LookupError, TypeError):
            pass
        refuse(record)
    return take_record
"""


class ResultRows:
    """Collects the records that one function returns, and builds batches of a schema from them."""

    def __init__(self, uid: str, schema: pa.Schema) -> None:
        self._uid = uid
        self.schema = schema
        self._values: list[Any] = []
        """The values, row after row: a single list is many times cheaper than a tuple per row."""
        templates = tuple(_copy_template(field.type, at) for at, field in enumerate(schema))
        self.take_record: Callable[[Record], None] = _maker(tuple(schema.names), templates)(
            self._values.extend, self._refuse, copy_value, schema.types, _copy_pairs
        )
        """Copies the values of one record.

        Raises UserFunctionError if the record is not a dict with exactly the columns of the schema.
        """

    @property
    def count(self) -> int:
        """The number of records since the last batch."""
        return len(self._values) // len(self.schema) if len(self.schema) else 0

    def take(self, result: Results) -> None:
        """Add the result of a function: a record, several records, or None for none.

        Raises:
            UserFunctionError: See `take_record`.
        """
        if isinstance(result, dict):
            self.take_record(cast("Record", result))
        elif result is not None:
            for record in result:
                self.take_record(record)

    def batch(self) -> pa.RecordBatch:
        """Return the records since the last batch.

        Raises:
            UserFunctionError: A column cannot hold a value exactly; names column and record.
        """
        width = len(self.schema)
        arrays: list[pa.Array] = []
        for index, field in enumerate(self.schema):
            try:
                arrays.append(exact_array(self._values[index::width], field.type))
            except InexactValue as error:
                values = self._values[error.row * width : (error.row + 1) * width]
                record = dict(zip(self.schema.names, values, strict=True))
                problem = (
                    f"a value for column {field.name!r} that does not fit {field.type}: {error}"
                )
                raise result_error(self._uid, problem, field.name, record) from error
        self._values.clear()
        return pa.record_batch(arrays, schema=self.schema)

    def batch_of_pieces(self, pieces: Iterable[object]) -> pa.RecordBatch:
        """Iterate over `pieces` and return the records collected meanwhile as one batch.

        Each piece is converted to columns at once.

        Raises:
            UserFunctionError: See `batch`.
        """
        batches = [self.batch() for _ in pieces]
        if len(batches) == 1:
            return batches[0]
        if not batches:
            return self.batch()
        columns = zip(*(batch.columns for batch in batches), strict=True)
        return pa.record_batch([pa.concat_arrays(parts) for parts in columns], schema=self.schema)

    def _refuse(self, record: Any) -> None:
        """Raise UserFunctionError with the reason why `record` does not fit the schema."""
        raise self._record_error(record)

    def _record_error(self, record: Any) -> UserFunctionError:
        names = self.schema.names
        if not isinstance(record, dict):
            problem = f"a {type(record).__name__} instead of a record (a dict)"
            return result_error(self._uid, problem, "", record)
        values = cast("Record", record)
        for name in names:
            if name not in values:
                problem = (
                    f"a record without column {name!r}; return every column of the schema or"
                    " declare another schema"
                )
                return result_error(self._uid, problem, name, values)
        unknown = [name for name in values if name not in names]
        problem = (
            f"a record with {', '.join(map(repr, unknown))}, but its schema has only the columns"
            f" {', '.join(names)}: declare the schema of the returned records, or omit these"
            " columns"
        )
        return result_error(self._uid, problem, str(unknown), values)


@lru_cache(maxsize=256)
def _maker(names: tuple[str, ...], templates: tuple[str, ...]) -> Callable[..., Any]:
    """Return the factory of the function that copies a record's values.

    The code is generated, as for dataclasses: indexing with constant keys is the fastest way to
    read a dict. Column names are inserted as string literals; values never are.
    """
    read = [f"record[{name!r}]" for name in names]
    values = [template.format(value=value) for value, template in zip(read, templates, strict=True)]
    code = _TAKE_RECORD.format(width=len(names), values="".join(f"{value}, " for value in values))
    namespace: dict[str, Any] = {}
    exec(code, namespace)  # noqa: S102
    return cast("Callable[..., Any]", namespace["make"])


def _copy_template(kind: pa.DataType, at: int) -> str:
    """Return the code that copies a value of column `at`, which has type `kind`."""
    if pa.types.is_dictionary(kind):
        return _copy_template(kind.value_type, at)
    if is_text(kind):
        # Nearly all values are str, which need no call; a bytearray becomes text, too.
        return "(text if (text := {value}).__class__ is str else copy_value(text))"
    if holds(kind, pa.types.is_map):
        return f"copy_pairs({{value}}, kinds[{at}])"
    return "copy_value({value})" if pa.types.is_nested(kind) or is_bytes(kind) else "{value}"


def _copy_pairs(value: Any, kind: pa.DataType) -> Any:
    """Return a copy of `value` with tuples as the pairs of maps, as Arrow takes them.

    Arrow's records have such tuples. A state of `dict` returns them as lists.
    """
    try:
        if value is not None and pa.types.is_map(kind):
            entries: Any = value
            pairs: Iterable[tuple[Any, Any]] = (
                entries.items() if isinstance(value, Mapping) else entries
            )
            keys, items = kind.key_type, kind.item_type
            return [(_copy_pairs(key, keys), _copy_pairs(item, items)) for key, item in pairs]
        if value is not None and is_list(kind):
            return [_copy_pairs(element, kind.value_type) for element in value]
        if isinstance(value, Mapping) and pa.types.is_struct(kind):
            types = {field.name: field.type for field in kind}
            return {
                name: _copy_pairs(member, types.get(name, pa.null()))
                for name, member in cast("Mapping[str, Any]", value).items()
            }
    except (TypeError, ValueError):
        # The value has another form, which the conversion to a column refuses by name.
        pass
    return copy_value(value)
