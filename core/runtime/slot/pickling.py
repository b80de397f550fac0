"""Pickling of programs by cloudpickle, with fixes for values that it would break.

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
import io
import typing
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar, cast

import cloudpickle
import msgspec

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
        field.name: _options_of(field)
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


def _options_of(field: Any) -> dict[str, Any]:
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
