"""The parameters of tables in a connector file, taken from the class or function that it calls.

Names, types and defaults come from the signature. If an argument is an option of a connector
(`core.spi.options`), its help and its kind of value come from there. The same description is used
to check values and to build the JSON schema for editors.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Mapping as MappingType
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, is_dataclass
from datetime import datetime
from difflib import get_close_matches
from enum import Enum
from typing import Any, Literal, cast

from onceflow.core.errors import ConfigError
from onceflow.core.spi import options

Schema = dict[str, Any]
"""A JSON schema."""

_ANYTHING: Schema = {"type": ["string", "object"]}
"""The schema of a text or a table that the called class checks itself."""
_SCHEMA_OF_KIND: Sequence[tuple[options.ValueKind, Schema]] = (
    (options.BOOLEAN, {"type": "boolean"}),
    (options.COUNT, {"type": "integer", "minimum": 1}),
    (options.WHOLE, {"type": "integer"}),
    (options.DURATION, {"type": ["number", "string"]}),
    (options.NAMES, {"type": ["string", "array"], "items": {"type": "string"}}),
    (options.JSON_VALUE, {"type": ["string", "object"]}),
)
_SCHEMA_OF_TYPE: Mapping[object, Schema] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
}
_WORD_OF_TYPE = {
    "string": "text",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "array": "a list",
    "object": "a table",
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A name that a table may contain."""

    name: str
    hint: object
    """The type, or None if it is unknown."""
    default: object
    is_required: bool
    meaning: options.OptionMeaning | None

    @property
    def record(self) -> type[Any] | None:
        """The dataclass that a table under this name describes, or None."""
        records = (member for member in _members(self.hint) if isinstance(member, type))
        return next((record for record in records if is_dataclass(record)), None)

    @property
    def keeps_references(self) -> bool:
        """True if the called class resolves references to secrets in the value itself."""
        is_secret = self.meaning is not None and self.meaning.secret
        return (is_secret and self.name != "url") or any(map(_is_mapping, _members(self.hint)))

    def to_schema(self) -> Schema:
        """Return the JSON schema of the value."""
        schema = dict(self._type_schema())
        if self.meaning is not None:
            schema["description"] = f"{self.meaning.help}."
        if isinstance(self.default, (str, int, float)) and not self.is_required:
            schema["default"] = (
                self.default.value if isinstance(self.default, Enum) else self.default
            )
        return schema

    def parse(self, written: object, where: str) -> object:
        """Convert the value `written` to the argument.

        Raises:
            ConfigError: The value is invalid. The message has the accepted values, but no secret.
        """
        # TOML has no null.
        if written == "none" and self._takes_none():
            return None
        record = self.record
        if record is not None:
            return parse_record(record, written, f"{where}.{self.name}")
        if not fits(self._type_schema(), written):
            raise ConfigError(self._refuse(written, where))
        kind = self.meaning.kind if self.meaning is not None else None
        # The called class parses text that may be JSON, because it knows its meaning.
        if isinstance(written, str) and kind is not None and kind is not options.JSON_VALUE:
            return self._parse_text(kind, written, where)
        return tuple(cast("list[object]", written)) if isinstance(written, list) else written

    def _parse_text(self, kind: options.ValueKind, written: str, where: str) -> object:
        try:
            return kind.parse(written)
        except ValueError:
            raise ConfigError(self._refuse(written, where)) from None
        except ConfigError as error:
            raise ConfigError(f"{where}: {self.name}: {error}") from None

    def _takes_none(self) -> bool:
        return type(None) in _members(self.hint)

    def _refuse(self, written: object, where: str) -> str:
        is_secret = self.meaning is not None and self.meaning.secret
        shown = "" if is_secret else f"={written!r}"
        return f"{where}: {self.name}{shown} must be {self._describe_values()}"

    def _describe_values(self) -> str:
        schema = self._type_schema()
        if "enum" in schema:
            return f"one of {', '.join(map(str, schema['enum']))}"
        if self.meaning is not None and self.meaning.kind in dict(_SCHEMA_OF_KIND):
            return self.meaning.kind.words
        kinds = schema.get("type", [])
        return " or ".join(
            _WORD_OF_TYPE[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds)
        )

    def _type_schema(self) -> Schema:
        if self.record is not None:
            return schema_of_record(self.record)
        kind = self.meaning.kind if self.meaning is not None else None
        if kind is not None and kind.choices:
            return {"enum": list(kind.choices)}
        known = next((schema for candidate, schema in _SCHEMA_OF_KIND if candidate is kind), None)
        return known or _schema_of_hint(self.hint)


def fits(schema: Schema, value: object) -> bool:
    """Return True if `schema` of an argument allows `value`."""
    if "enum" in schema:
        return isinstance(value, str) and value.strip().lower() in schema["enum"]
    kinds = schema.get("type")
    if kinds is None:
        return True
    allowed = [kinds] if isinstance(kinds, str) else kinds
    if _name_kind(value) not in allowed and not (
        _name_kind(value) == "integer" and "number" in allowed
    ):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(fits(schema["items"], item) for item in cast("list[object]", value))
    return not ("minimum" in schema and cast("int", value) < schema["minimum"])


def _name_kind(value: object) -> str:
    match value:
        # bool comes before int, because True is an int in Python.
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str() | datetime():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


# --- tables --------------------------------------------------------------------------------------


def check_names(names: Sequence[str], known: Sequence[str], where: str) -> None:
    """Raise ConfigError if a name is not among `known`. The message has a similar name."""
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{where}: {name!r} is not a parameter here; {meant}")


def parse_arguments(
    parameters: Mapping[str, Parameter], table: Mapping[str, object], where: str
) -> dict[str, Any]:
    """Convert `table` to arguments by name.

    Raises:
        ConfigError: A name is unknown, a required name is missing, or a value is invalid.
    """
    check_names(list(table), list(parameters), where)
    missing = [
        parameter.name
        for parameter in parameters.values()
        if parameter.is_required and parameter.name not in table
    ]
    if missing:
        raise ConfigError(f"{where}: {' and '.join(missing)} must be given")
    return {name: parameters[name].parse(value, where) for name, value in table.items()}


def parse_record(record: type[Any], written: object, where: str) -> Any:
    """Build the dataclass `record` from a table, or from the value of its first field.

    Raises:
        ConfigError: As in `parse_arguments`, or raised by `record` itself.
    """
    parameters = list_parameters(record)
    if not isinstance(written, dict):
        written = {next(iter(parameters)): written}
    arguments = parse_arguments(parameters, cast("dict[str, object]", written), where)
    try:
        return record(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def schema_of_record(record: type[Any]) -> Schema:
    """Return the JSON schema of a table for `record`, or of the value of its first field."""
    parameters = list_parameters(record)
    first = next(iter(parameters.values()))
    others_required = [
        parameter.name for parameter in list(parameters.values())[1:] if parameter.is_required
    ]
    table = schema_of_table(parameters)
    return table if others_required else {"anyOf": [first.to_schema(), table]}


def schema_of_table(parameters: Mapping[str, Parameter]) -> Schema:
    """Return the JSON schema of a table with only these names."""
    return {
        "type": "object",
        "properties": {name: parameter.to_schema() for name, parameter in parameters.items()},
        "required": [name for name, parameter in parameters.items() if parameter.is_required],
        "additionalProperties": False,
    }


def list_parameters(called: Callable[..., object]) -> Mapping[str, Parameter]:
    """Return the parameters of `called`, a class or a function, by name."""
    parameters: dict[str, Parameter] = {}
    for parameter in inspect.signature(called).parameters.values():
        if parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        is_required = parameter.default is inspect.Parameter.empty
        parameters[parameter.name] = Parameter(
            parameter.name,
            _resolve_hint(called, parameter),
            None if is_required else parameter.default,
            is_required,
            options.find_meaning(called, parameter.name),
        )
    return parameters


# --- types ---------------------------------------------------------------------------------------


def _resolve_hint(called: Callable[..., object], parameter: inspect.Parameter) -> object:
    """Return the type of `parameter`, or None if it cannot be evaluated at run time."""
    hint: object = parameter.annotation
    if not isinstance(hint, str):
        return hint
    classes: Sequence[Any] = called.__mro__ if isinstance(called, type) else (called,)
    for holder in classes:
        if parameter.name in getattr(holder, "__annotations__", {}) or not isinstance(called, type):
            try:
                # Annotations are text in modules with `from __future__ import annotations`.
                # Evaluate them in their own module. Names that are imported only for type checkers
                # are missing there.
                return eval(hint, vars(sys.modules[holder.__module__]))  # noqa: S307 - our own
            except (NameError, TypeError):
                return None
    return None


def _members(hint: object) -> tuple[object, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(
            member for alternative in typing.get_args(hint) for member in _members(alternative)
        )
    return (hint,)


def _is_mapping(hint: object) -> bool:
    return typing.get_origin(hint) is MappingType


def _schema_of_hint(hint: object) -> Schema:
    if hint is None:
        return _ANYTHING
    members = [member for member in _members(hint) if member is not type(None)]
    choices = [choice for member in members for choice in _list_choices(member)]
    if choices:
        return {"enum": choices}
    kinds: list[str] = []
    schema: Schema = {}
    for member in members:
        if member in _SCHEMA_OF_TYPE:
            kinds.append(_SCHEMA_OF_TYPE[member]["type"])
        elif _is_mapping(member):
            kinds.append("object")
        elif typing.get_origin(member) in (SequenceType, tuple, list):
            kinds.append("array")
            schema["items"] = {"type": "string"}
    return schema | ({"type": kinds} if kinds else {})


def _list_choices(hint: object) -> list[str]:
    if typing.get_origin(hint) is Literal:
        return [str(choice) for choice in typing.get_args(hint)]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [str(member.value) for member in hint]
    return []
