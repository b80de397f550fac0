"""The user's program on its way to the slots, and its pickling by cloudpickle.

Sources, sinks and functions may hold passwords, and Spark writes the content of a task to
executors' disks. So a program is pickled once, when the job is started, and sent to each slot in
its `Deploy` message, over the authenticated control stream.

Pickling:

cloudpickle sends objects defined in `__main__` by value. Three kinds of them need a fix:

- `dataclasses.MISSING` marks a field without a default and is compared by identity. A copy of it
  would be taken for a default value, and fill new fields. It is sent by name.
- A class of `msgspec.Struct` needs its fields when it is created, but cloudpickle adds them later.
  It is rebuilt from its fields.
- The file name of a function: since 3.1.3 cloudpickle sends `<dynamic-code>` instead, and an error
  in a slot could not name the user's line. The name is restored when the code is read.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import socket
import typing
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from types import CodeType
from typing import Any, ClassVar, cast

import cloudpickle
import msgspec

from onceflow.core.errors import ConfigError
from onceflow.core.plan.graph import Graph
from onceflow.core.state import StateBackend

_BY_NAME: dict[int, str] = {
    id(value): name
    for name, value in vars(dataclasses).items()
    if name in {"MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY"}
}
_CONFIGURED = (
    *("frozen", "order", "eq", "array_like", "gc", "repr_omit_defaults", "omit_defaults"),
    *("forbid_unknown_fields", "weakref", "dict", "cache_hash", "tag", "tag_field"),
)
_MADE = frozenset(
    {"__annotations__", "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__"}
)
_Struct: Any = type(msgspec.Struct)


_reduce_code: Callable[[CodeType], tuple[Callable[..., CodeType], tuple[Any, ...]]] = (
    cloudpickle.Pickler.dispatch_table[CodeType]
)


def _reduce_code_of_file(code: CodeType) -> tuple[Any, ...]:
    make, arguments = _reduce_code(code)
    return make_code, (code.co_filename, make, arguments)


def make_code(filename: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    """Return code with the name of the file that it comes from. Runs in a slot."""
    return make(*arguments).replace(co_filename=filename)


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar[ChainMap[type, Any]] = ChainMap(
        {CodeType: _reduce_code_of_file}, cloudpickle.Pickler.dispatch_table
    )

    def reducer_override(self, obj: Any) -> Any:
        name = _BY_NAME.get(id(obj))
        if name is not None:
            return name
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and isinstance(obj, _Struct):
            return _reduce_struct(obj)
        return reduced


def pickle_by_value(value: object) -> bytes:
    """Pickle `value` to bytes that `cloudpickle.loads` reads."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _reduce_struct(kind: Any) -> tuple[Any, ...]:
    """Return the reduction that rebuilds a `msgspec.Struct` class: fields first, others later."""
    namespace: dict[str, Any] = {**kind.__dict__}
    own: dict[str, Any] = namespace.get("__annotations__", {})
    hints = _resolve_annotations(kind, own)
    members: dict[str, Any] = {
        "__annotations__": hints,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    fields = {
        field.name: _resolve_options(field)
        for field in msgspec.structs.fields(kind)
        if field.name in own
    }
    config = {name: getattr(kind.__struct_config__, name) for name in _CONFIGURED}
    others: dict[str, Any] = {
        name: value
        for name, value in namespace.items()
        if name not in _MADE
        and name not in kind.__struct_fields__
        and not name.startswith(("__struct_", "__match_args__", "__slots__"))
    }
    # The other members are set later, because methods may refer to the class.
    if any(isinstance(hint, str) for hint in hints.values()):
        # msgspec resolves type names in the class's namespace, too: add the class itself.
        others[kind.__name__] = kind
    made_of: tuple[Any, ...] = (kind.__name__, kind.__bases__, members, fields, config)
    return make_struct, made_of, others, None, None, _fill


def _resolve_annotations(kind: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Return the types of fields. Text annotations are resolved here, not in the slot."""
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except (NameError, TypeError):
        return dict(own)
    return {
        name: text if _mentions(hints.get(name), kind) else hints.get(name, text)
        for name, text in own.items()
    }


def _mentions(hint: object, kind: object) -> bool:
    return hint is kind or any(_mentions(argument, kind) for argument in typing.get_args(hint))


def _resolve_options(field: Any) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if field.default is not msgspec.NODEFAULT:
        given["default"] = field.default
    elif field.default_factory is not msgspec.NODEFAULT:
        given["default_factory"] = field.default_factory
    if field.encode_name != field.name:
        given["name"] = field.encode_name
    return given


def make_struct(
    name: str,
    bases: tuple[type, ...],
    members: dict[str, Any],
    fields: dict[str, dict[str, Any]],
    config: dict[str, Any],
) -> Any:
    """Return a class of `msgspec.Struct`. Runs in a slot."""
    made = {name: msgspec.field(**options) for name, options in fields.items() if options}
    try:
        return _Struct(name, bases, members | made, **config)
    except TypeError:
        # A field without a default after a field with one: the fields were keyword-only.
        return _Struct(name, bases, members | made, **config, kw_only=True)


def _fill(kind: Any, others: dict[str, Any]) -> None:
    for name, value in others.items():
        setattr(kind, name, cast("object", value))


MODULES_ON_EXECUTORS = (
    "send it with spark-submit --py-files, spark.submit.pyFiles or SparkContext.addPyFile, or"
    " install it in the Python environment of every executor (spark.archives for a packed one)"
)


@dataclass(frozen=True, slots=True)
class Program:
    """The part of a job that may hold secrets and functions."""

    graph: Graph
    backend: StateBackend


def pickle_program(program: Program) -> bytes:
    """Pickle `program`. Closures and objects defined in `__main__` go by value.

    Raises:
        ConfigError: An object in it cannot be pickled; names the operator, and the variable of its
            function if known.
    """
    try:
        return pickle_by_value(program)
    except Exception as error:
        raise ConfigError(
            f"{_culprit(program)} cannot be sent to the slots: {type(error).__name__}: {error}."
            " Create locks, connections and sessions where they are used: in a KeyedFunction's"
            " open(), in a sink's writer(), or inside the function"
        ) from error


def unpickle_program(data: bytes) -> Program:
    """Unpickle a program. Runs in a slot.

    Raises:
        ConfigError: This executor lacks a required module, or has another one of that name.
    """
    try:
        return cast("Program", cloudpickle.loads(data))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the pipeline needs the module {error.name!r}, which the executor on"
            f" {socket.gethostname()} does not have: {MODULES_ON_EXECUTORS}"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"the executor on {socket.gethostname()} cannot load the pipeline:"
            f" {type(error).__name__}: {error}; the executor needs the same modules as the"
            f" driver: {MODULES_ON_EXECUTORS}"
        ) from error


def _culprit(program: Program) -> str:
    """Return the name of the part of `program` that cannot be pickled, as precisely as possible."""
    for operator in program.graph.operators:
        for field in fields(operator.work):
            value = getattr(operator.work, field.name)
            if not _pickles(value):
                named = getattr(value, "__qualname__", type(value).__qualname__)
                held = "".join(f", which holds {name!r}," for name in _unpicklable_names(value))
                return f"{field.name} {named} of operator {operator.uid!r}{held}"
    return "the state backend" if not _pickles(program.backend) else "the pipeline"


def _unpicklable_names(value: object) -> Iterator[str]:
    """Yield the name of the first variable used by a function that cannot be pickled."""
    if not inspect.isfunction(value):
        return
    variables = inspect.getclosurevars(value)
    for name, held in (*variables.nonlocals.items(), *variables.globals.items()):
        if not _pickles(held):
            yield name
            return


def _pickles(value: object) -> bool:
    try:
        pickle_by_value(value)
    except Exception:
        return False
    return True
