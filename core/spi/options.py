"""The options of connectors, and the rules for options that go to a client library.

Each option is declared once, as a field of the user's frozen dataclass. The field has the option's
name in Python, its type and its default. Its metadata contain an `OptionMeaning`: the help, the
text that may stand for a value, and the name in Spark's formats. Everything else that shows or
reads options is derived: Spark's formats, the tables in the documents, the arguments in a class's
docstring.

A connector declares as `OptionRules` which options of its client library are allowed or secret. The
names of these options stay with the connector.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from onceflow.core.errors import ConfigError
from onceflow.core.secret_references import follow_references
from onceflow.core.setting_values import seconds_of

_T = TypeVar("_T")
_KEY = "onceflow.option"
_DOCSTRING_WIDTH = 100


@dataclass(frozen=True, slots=True)
class ValueKind:
    """The kind of text that an option accepts."""

    words: str
    """The description of a valid value, for errors and documents."""
    parse: Callable[[str], object]
    """A function that returns the value, or raises ValueError or ConfigError."""
    choices: tuple[str, ...] = ()
    """All valid values; empty if they cannot be listed."""


def _parse_boolean(text: str) -> bool:
    values = {"true": True, "false": False}
    if text.strip().lower() not in values:
        raise ValueError
    return values[text.strip().lower()]


def _parse_count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _parse_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError
    return names


def _parse_duration(text: str) -> float:
    try:
        # Spark passes every value as text, also a plain number, which means seconds in Python.
        duration: float | str = float(text)
    except ValueError:
        duration = text
    return seconds_of(duration, setting="it")


def _parse_json(text: str) -> object:
    """Return the value of `text` if it is a JSON object, otherwise the text."""
    # A file's path or an expression never begins with a brace, so the user need not say which it
    # is.
    return json.loads(text) if text.lstrip().startswith("{") else text


TEXT = ValueKind("text", str)
BOOLEAN = ValueKind("true or false", _parse_boolean)
COUNT = ValueKind("a whole number, 1 or more", _parse_count)
WHOLE = ValueKind("a whole number", int)
NAMES = ValueKind("names with commas between them", _parse_names)
DURATION = ValueKind(
    "a duration: seconds, or a number with a unit, as in 500 ms, 5 s, 10 min", _parse_duration
)
JSON_VALUE = ValueKind("text, or a JSON object", _parse_json)


def choice(*words: str | type[Enum]) -> ValueKind:
    """Return the kind whose values are `words`, and those of the enumerations among them."""
    choices = [
        str(word)
        for given in words
        for word in ((given,) if isinstance(given, str) else (member.value for member in given))
    ]

    def parse(text: str) -> str:
        if text.strip().lower() not in choices:
            raise ValueError
        return text.strip().lower()

    return ValueKind(f"one of {', '.join(choices)}", parse, tuple(choices))


@dataclass(frozen=True, slots=True)
class OptionMeaning:
    """The description of an option, besides the name, type and default of its field."""

    help: str
    """The help for documents and errors, in Python's terms; formats have their own wording."""
    kind: ValueKind
    spark: str
    """The name in Spark's formats; empty if they have no such option. `kafka.*` stands for all
    options that begin with `kafka.`. They become a mapping, without this prefix."""
    aliases: tuple[str, ...]
    """The other names in Spark's formats."""
    secret: bool
    """True if the value must never be shown."""


def option(
    text: str,
    kind: ValueKind = TEXT,
    *,
    spark: str = "",
    aliases: tuple[str, ...] = (),
    secret: bool = False,
) -> Mapping[str, object]:
    """Return metadata for `dataclasses.field`; `text` is the help."""
    return {_KEY: OptionMeaning(text, kind, spark, aliases, secret)}


def list_options(description: type[Any]) -> Iterator[tuple[str, OptionMeaning]]:
    """Yield the name and the meaning of each option of a dataclass; the name is Python's."""
    for field in fields(description):
        meaning = field.metadata.get(_KEY)
        if isinstance(meaning, OptionMeaning):
            yield field.name, meaning


def find_meaning(description: object, name: str) -> OptionMeaning | None:
    """Return the meaning of the option `name` of a dataclass, or None if it has no such option."""
    if not isinstance(description, type) or not is_dataclass(description):
        return None
    return next((meaning for known, meaning in list_options(description) if known == name), None)


def option_of(description: type[Any], name: str) -> Mapping[Any, Any]:
    """Return the metadata of a field, for a subclass that declares it with another default."""
    # Share the metadata instead of copying it, so that help and Spark's name stay the same in the
    # subclass.
    (declared,) = (field for field in fields(description) if field.name == name)
    return declared.metadata


def copy_values(description: Any, shared: type[Any]) -> dict[str, Any]:
    """Return the values of `description` in the fields of `shared`, one of its base classes."""
    return {field.name: getattr(description, field.name) for field in fields(shared)}


def document_options(description: type[_T]) -> type[_T]:
    """Add the options of a dataclass to its docstring, as its arguments."""
    lines = [inspect.cleandoc(description.__doc__ or ""), "", "Args:"]
    for name, meaning in list_options(description):
        lines += textwrap.wrap(
            f"{name}: {meaning.help}.",
            width=_DOCSTRING_WIDTH,
            initial_indent="    ",
            subsequent_indent="        ",
        )
    # Set it before any reader: the site, `help()` and the signature checks see the same text.
    description.__doc__ = "\n".join(lines)
    return description


OptionValue: TypeAlias = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class OptionRules:
    """The options of one client that a user may set, and their names."""

    what: str
    """The term for such an option in errors: "Kafka option"."""
    prefix: str
    """The optional prefix of a name, which is removed."""
    owned: Mapping[str, str]
    """The options that `owner` sets itself, each with what to give instead, or why nothing can be
    given."""
    owner: str
    foreign: Mapping[str, str]
    """The options known only to `foreign_client`, each with what to give instead."""
    foreign_client: str
    foreign_files: Mapping[str, str]
    """The endings of files that the client cannot read, each with the type of such a file, and what
    to give instead."""
    secret_parts: tuple[str, ...]
    """The parts of names whose options are never printed."""

    def accept(self, options: Mapping[str, OptionValue]) -> dict[str, str]:
        """Check `options` and return them under the client's names, as text.

        Raises:
            ConfigError: An option belongs to another client or to the owner; the error says what to
                give instead. Or an option is given twice.
        """
        accepted: dict[str, str] = {}
        for given, value in options.items():
            name = given.removeprefix(self.prefix)
            shown = f"{self.what} {given!r}"
            # Check foreign names before owned ones: the advice for another client's option is more
            # useful than the statement that the option cannot be set.
            if name in self.foreign:
                raise ConfigError(f"{shown} is {self.foreign_client}'s: {self.foreign[name]}")
            if name in self.owned:
                raise ConfigError(f"{shown} is set by {self.owner}: {self.owned[name]}")
            # Client libraries read `true`, not Python's `True`.
            text = str(value).lower() if isinstance(value, bool) else str(value)
            for ending, advice in self.foreign_files.items():
                if text.endswith(ending):
                    raise ConfigError(f"{shown} names {advice}")
            # With and without the prefix it is the same option, and it is not clear which of two
            # values would win.
            if accepted.setdefault(name, text) != text:
                raise ConfigError(f"{self.what} {name!r} is given twice, with different values")
        return accepted

    def resolve_secrets(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return `options` with the secrets that they refer to. Called when a client is opened.

        Raises:
            ConfigError: A reference cannot be resolved here.
        """
        return {
            name: follow_references(value, setting=f"{self.what} {name!r}")
            for name, value in options.items()
        }

    def printable(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return `options` with every secret value hidden."""
        return {name: "***" if self._is_secret(name) else value for name, value in options.items()}

    def without_secrets(self, text: str, options: Mapping[str, str]) -> str:
        """Return `text` with every secret value of `options` hidden in it."""
        for name, value in self.resolve_secrets(options).items():
            if self._is_secret(name) and value:
                # An error of a client may quote its configuration, so hide values anywhere in the
                # text.
                text = text.replace(value, "***")
        return text

    def _is_secret(self, name: str) -> bool:
        return any(part in name.lower() for part in self.secret_parts)
