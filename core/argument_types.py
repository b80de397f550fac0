"""The check of users' arguments by the types that settings, connectors and operators declare.

Python itself checks no annotation. Without this check `create="false"` would be true, and a path
where a text belongs would end as an AttributeError inside of onceflow.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import wraps
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import ParamSpec

from onceflow.core.errors import ConfigError
from onceflow.core.printable import escape_controls

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Class = TypeVar("_Class", bound="type[Any]")

_LISTS = (list, tuple, set, frozenset)
_PLAIN = (
    *_LISTS, bool, int, float, complex, str, bytes, bytearray, memoryview, dict, range, NoneType,
    timedelta, type,
)  # fmt: skip
"""Types whose values are an instance of no class of ours."""
_SCALARS: Mapping[Any, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, bool),
    int: lambda value: isinstance(value, int) and not isinstance(value, bool),
    float: lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    str: lambda value: isinstance(value, str),
    bytes: lambda value: isinstance(value, bytes),
    NoneType: lambda value: value is None,
    None: lambda value: value is None,
    type: lambda _: True,
    Callable: callable,
    object: lambda _: True,
    Any: lambda _: True,
}
_WORDS: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    NoneType: "None",
    None: "None",
    Callable: "a function",
}


def check_fields(settings: _Class) -> _Class:
    """Let the class refuse an argument whose type is not the declared one.

    A path becomes a text, and a `timedelta` seconds, where the declared type takes no such object
    itself. If the class is a dataclass, this decorator stands directly above `@dataclass`.

    Raises:
        ConfigError: Raised by the class. Names the class, the argument and what it takes.
    """
    initialize: Callable[..., None] = settings.__init__
    checked = _check(initialize, settings.__name__, settings)
    setattr(settings, "__init__", checked)  # noqa: B010 - a type checker minds assignment
    return settings


def check_arguments(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let the function or method refuse an argument whose type is not the declared one.

    Raises:
        ConfigError: Raised by the function. Names the function, the argument and what it takes.
    """
    return _check(call, call.__name__, None)


def _check(call: Callable[_P, _T], owner: str, settings: type[Any] | None) -> Callable[_P, _T]:
    signature = inspect.signature(call)
    types: dict[str, Any] = {}

    @wraps(call)
    def call_with_checks(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not types:  # read at the first call: until then modules may import each other
            types.update(_list_types(call, settings))
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return call(*args, **kwargs)  # Python's own error names the missing argument
        for name, value in bound.arguments.items():
            if name in types:
                parameter = signature.parameters[name]
                bound.arguments[name] = _take_argument(value, parameter, types[name], owner)
        return call(*bound.args, **bound.kwargs)

    return call_with_checks


def _list_types(call: Callable[..., Any], settings: type[Any] | None) -> dict[str, Any]:
    """Return the declared type of each argument by its name."""
    types: dict[str, Any] = {}
    # Dataclasses compile the `__init__` that they generate from a string.
    is_generated = is_dataclass(settings) and call.__code__.co_filename == "<string>"
    if settings is None or not is_generated:
        space = sys.modules[call.__module__]
        for name, annotation in inspect.get_annotations(call).items():
            types[name] = _read_type(annotation, dict(vars(space)))
        return types
    arguments = {field.name for field in fields(settings) if field.init}
    for base in reversed(settings.__mro__):
        space = sys.modules[base.__module__]
        for name, annotation in inspect.get_annotations(base).items():
            if name in arguments:
                types[name] = _read_type(annotation, dict(vars(space)))
    return types


def _read_type(annotation: Any, known: dict[str, Any]) -> Any:
    """Return the type that the annotation names.

    A name that is imported for type checkers only is taken for a class of which no plain value is
    an instance. An annotation that only type checkers can read allows everything.
    """
    holder = SimpleNamespace(__annotations__={"it": annotation})
    while True:
        try:
            return get_type_hints(holder, known)["it"]
        except NameError as error:
            known[str(error.name)] = type(str(error.name), (), {})
        except TypeError:
            return Any


def _take_argument(value: Any, parameter: inspect.Parameter, hint: Any, owner: str) -> Any:
    """Return the value of a parameter, which `*` and `**` collect."""
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return tuple(_take(each, hint, owner, parameter.name) for each in value)
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return {name: _take(each, hint, owner, name) for name, each in value.items()}
    return _take(value, hint, owner, parameter.name)


def _take(value: Any, hint: Any, owner: str, name: str) -> Any:
    """Return the value in the declared type.

    Raises:
        ConfigError: The value has another type.
    """
    if _fits(value, hint):
        return value
    if _is_path(value) and _fits("", hint):
        return value.__fspath__()
    if isinstance(value, timedelta) and _fits(0.0, hint):
        return value.total_seconds()
    raise ConfigError(f"{owner}({name}=…) takes {_describe(hint)}, and was given {_show(value)}")


def _show(value: Any) -> str:
    """Return the value for an error. No secret is shown: secrets are texts in places of texts."""
    if isinstance(value, type):
        return f"the class {value.__name__}: give an object of it, {value.__name__}(…)"
    if isinstance(value, (str, bool, int, float)):
        return f"{escape_controls(repr(value)[:100])}, of type {type(value).__name__}"
    return f"a value of type {type(value).__name__}"


def _fits(value: Any, hint: Any) -> bool:
    """Return True if the value is of the type, as far as its outermost layers tell."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return any(_fits(value, member) for member in get_args(hint))
    if kind is Literal:
        return any(type(value) is type(choice) for choice in get_args(hint))
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    if not isinstance(kind, type) or not (isinstance(value, _PLAIN) or _is_path(value)):
        return True
    return _fits_list(value, get_args(hint)) if _is_list(kind) else _is_instance(value, kind)


def _is_path(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "__fspath__")


def _is_list(kind: type[Any]) -> bool:
    return issubclass(kind, Collection) and not issubclass(kind, Mapping)


def _fits_list(value: Any, elements: tuple[Any, ...]) -> bool:
    """Return True if the value is a list, tuple or set of such elements. A text is none of them."""
    if not isinstance(value, _LISTS):
        return False
    of_one_type = len(elements) == 1 or elements[1:] == (Ellipsis,)
    return not of_one_type or all(_fits(each, elements[0]) for each in cast("list[Any]", value))


def _is_instance(value: Any, kind: type[Any]) -> bool:
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol that cannot be asked; no plain value fulfils one of ours
        return False


def _describe(hint: Any) -> str:
    kind: Any = get_origin(hint) or hint
    if kind in (Union, UnionType):
        *others, last = dict.fromkeys(_describe(member) for member in get_args(hint))
        return f"{', '.join(others)} or {last}" if others else last
    if kind is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(hint))
    if isinstance(kind, type) and kind not in _WORDS and _is_list(kind):
        elements = get_args(hint)
        return f"a list ({_describe(elements[0])} each)" if elements else "a list"
    return _WORDS.get(kind) or str(getattr(kind, "__name__", kind))
