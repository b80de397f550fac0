"""Options of Spark formats, said as data: a table gives parsing, its errors and the documents.

Spark hands names over in lower case, so case never counts. An option is read by its table only;
what it becomes is an argument of a sink or a source, whose own default holds where the option is
not given. A value that refers to a secret (`${env:NAME}`, `${file:/path}`) is passed on as it is:
whoever connects follows it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from typing import Generic, TypeVar, cast

from onceflow.connectors.spark.options.words import OptionWords
from onceflow.core.errors import ConfigError
from onceflow.core.setting_values import seconds_of
from onceflow.core.spi import Sink

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class SparkKind:
    """What the text of an option may be."""

    words: str
    """What it must be, for errors and documents."""
    parse: Callable[[str], object]
    """Returns the value, or raises ValueError or ConfigError."""


def _boolean(text: str) -> bool:
    known = {"true": True, "false": False}
    if text.strip().lower() not in known:
        raise ValueError
    return known[text.strip().lower()]


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError
    return names


def _value_of_json(text: str) -> object:
    """Return what `text` says where it is a JSON object, and else the text."""
    return json.loads(text) if text.lstrip().startswith("{") else text


TEXT = SparkKind("text", str)
BOOLEAN = SparkKind("true or false", _boolean)
COUNT = SparkKind("a whole number, 1 or more", _count)
WHOLE = SparkKind("a whole number", int)
NAMES = SparkKind("names with commas between them", _columns)
DURATION = SparkKind(
    "a duration: seconds, or a number with a unit, as in 500 ms, 5 s, 10 min",
    lambda text: seconds_of(_number_or(text), setting="it"),
)
JSON_VALUE = SparkKind("text, or a JSON object", _value_of_json)


def _number_or(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def choice(*words: str | type[Enum]) -> SparkKind:
    """Return the kind of which each value is one of `words`, or of the values of an enumeration."""
    known = [
        str(word)
        for one in words
        for word in ((one,) if isinstance(one, str) else (member.value for member in one))
    ]

    def parse(text: str) -> str:
        if text.strip().lower() not in known:
            raise ValueError
        return text.strip().lower()

    return SparkKind(f"one of {', '.join(known)}", parse)


@dataclass(frozen=True, slots=True)
class SparkOption:
    """One option of a format."""

    name: str
    """As the documents write it."""
    argument: str
    """What it becomes: an argument of the table's target."""
    says: str
    """What it means, for the documents."""
    kind: SparkKind = TEXT
    aliases: tuple[str, ...] = ()
    secret: bool = False
    """Whether the value is never repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionTable(Generic[T_co]):
    """All options of one format in one direction."""

    format: str
    direction: str
    """`write`, `read` or `readStream`, for errors."""
    target: Callable[..., T_co]
    """Takes the arguments; its signature has their defaults."""
    options: tuple[SparkOption, ...]
    clients: Mapping[str, str] = field(default_factory=dict[str, str])
    """Options that begin with a key are a client's; its value is the argument that takes them, as
    a mapping without what they begin with."""
    clients_kind: SparkKind = TEXT
    named: Mapping[str, str] = field(default_factory=dict[str, str])
    """What else the target's errors call an option, and how it is called here."""
    instead: Mapping[str, str] = field(default_factory=dict[str, str])
    """What its errors say of things that a format has not, and what is said here."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Options that other formats have, and what to do instead."""
    ignored: Mapping[str, str] = field(default_factory=dict[str, str])
    """Options of other formats that change nothing here, and why."""

    def make(self, given: Mapping[str, str]) -> T_co:
        """Return what the target makes of `given`.

        Raises:
            ConfigError: As `arguments` says; or the target refuses them, in the options' words.
        """
        arguments = self.arguments(given)
        with self.words.translate_errors():
            return self.target(**arguments)

    @property
    def words(self) -> OptionWords:
        """What the target's arguments are called here."""
        names = {option.argument: option.name for option in self.options}
        names.update((argument, f"{prefix}*") for prefix, argument in self.clients.items())
        return OptionWords({**names, **self.named}, self.instead)

    def arguments(self, given: Mapping[str, str]) -> dict[str, object]:
        """Return the arguments that `given` says; what belongs to the protocol is passed over.

        Raises:
            ConfigError: An option is unknown, of another format or direction, given twice under two
                names, missing, or its value cannot be read.
        """
        known = {
            name.lower(): option
            for option in self.options
            for name in (option.name, *option.aliases)
        }
        arguments: dict[str, object] = {}
        given_as: dict[str, str] = {}
        for name, text in given.items():
            option = known.get(name.lower())
            if option is not None:
                if option.argument in given_as:
                    raise ConfigError(
                        f"format {self.format}: options {given_as[option.argument]!r} and"
                        f" {name!r} say the same; give one of the two"
                    )
                given_as[option.argument] = name
                arguments[option.argument] = self._value(
                    option.name, option.kind, text, option.secret
                )
            elif (prefix := self._prefix_of(name)) is not None:
                client = cast(
                    "dict[str, object]",
                    arguments.setdefault(self.clients[prefix], dict[str, object]()),
                )
                short = name[len(prefix) :]
                client[short] = self._value(name, self.clients_kind, text, secret=True)
            elif not self._is_known_elsewhere(name):
                raise ConfigError(self._unknown(name))
        self._require_needed(arguments)
        return arguments

    def default_of(self, option: SparkOption) -> object:
        """Return what holds where `option` is not given; `inspect.Parameter.empty` for nothing."""
        return inspect.signature(self.target).parameters[option.argument].default

    def _value(self, name: str, kind: SparkKind, text: str, secret: bool) -> object:
        try:
            return kind.parse(text)
        except (ValueError, ConfigError):
            shown = f"option {name!r}" if secret else f"option {name!r}={text!r}"
            raise ConfigError(f"format {self.format}: {shown} must be {kind.words}") from None

    def _prefix_of(self, name: str) -> str | None:
        """Return what says which client's option `name` is; None: none's."""
        if name.lower() in {other.lower() for other in self.refused}:
            return None
        return next((one for one in self.clients if name.lower().startswith(one)), None)

    def _is_known_elsewhere(self, name: str) -> bool:
        return name.lower() in {*_RESERVED, *(other.lower() for other in self.ignored)}

    def _require_needed(self, arguments: Mapping[str, object]) -> None:
        for option in self.options:
            if option.argument in arguments:
                continue
            if self.default_of(option) is inspect.Parameter.empty:
                raise ConfigError(
                    f"format {self.format} needs option {option.name!r}: {option.says}"
                )

    def _unknown(self, name: str) -> str:
        advice = {other.lower(): text for other, text in self.refused.items()}.get(name.lower())
        if advice is not None:
            return (
                f"format {self.format}: option {name!r} is not taken by {self.direction}: {advice}"
            )
        names = [option.name for option in self.options]
        known = (*names, *self.ignored, *self.refused, *_PROTOCOL_NAMES)
        prefixed = "".join(f", {one}*" for one in self.clients)
        return (
            f"format {self.format} has no option {name!r} for {self.direction}:"
            f" {_suggest(name, known)}there are {', '.join(sorted(names, key=str.lower))}{prefixed}"
        )


def _suggest(name: str, names: Iterable[str]) -> str:
    by_lower = {one.lower(): one for one in names}
    near = get_close_matches(name.lower(), by_lower, n=1)
    return f"did you mean {by_lower[near[0]]!r}? " if near else ""


@dataclass(frozen=True, slots=True)
class ProtocolOption:
    """An option that every format that writes has: it is about batches, not about the target."""

    name: str
    says: str


PROTOCOL_OPTIONS: tuple[ProtocolOption, ...] = (
    ProtocolOption(
        "checkpointLocation",
        "Spark's own, needed by `writeStream`: names the query, so each query has its own",
    ),
    ProtocolOption("queryName", "Spark's own"),
    ProtocolOption(
        "sinkId",
        "The name under which rows are prepared, instead of one made from checkpointLocation, or"
        " from table and txnAppId; one for each table",
    ),
    ProtocolOption(
        "txnAppId",
        "`write` only, with txnVersion: the name of the job that writes, to one table or several",
    ),
    ProtocolOption(
        "txnVersion",
        "`write` only, with txnAppId: a number that rises from write to write; one that was"
        " written to a table is not written to it again",
    ),
    ProtocolOption(
        "onBadRow",
        "`fail`, the default, ends the query at a row that the target can never take;"
        " `drop` leaves it out, counted and logged",
    ),
    ProtocolOption(
        "stagingLocation",
        "Where rows wait for their commit if the target cannot prepare them: a path or URL that"
        " driver and executors see; below checkpointLocation unless given. Jobs and queries may"
        " share one. Keep it: a sink of your own and a query know by it what is written, and are"
        " refused with another one; a database, files and Kafka (for as long as it keeps offsets)"
        " know what `write` with a token has written",
    ),
)
"""What the protocol reads; no table has an option of these names."""

_PROTOCOL_NAMES = tuple(option.name for option in PROTOCOL_OPTIONS)
_RESERVED = frozenset(name.lower() for name in _PROTOCOL_NAMES)


def sink_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return `given` without what the protocol reads: what a sink is made of."""
    return {name: value for name, value in given.items() if name.lower() not in _RESERVED}


class SinkOptions(Mapping[str, str]):
    """What a user's own sink is made of, by names in any case; remembers what was asked for.

    So a mistyped option of a sink that has no table is found, too: nobody asked for it.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        """Leave out what the protocol reads."""
        self._values = {name.lower(): value for name, value in sink_options(given).items()}
        self._asked: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        self._asked[name.lower()] = name
        if name.lower() not in self._values:
            raise MissingOption(name)
        return self._values[name.lower()]

    def __iter__(self) -> Iterator[str]:
        self._asked.update({name: name for name in self._values if name not in self._asked})
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def require_all_asked(self, format_name: str) -> None:
        """Raise ConfigError unless every given option was asked for.

        Raises:
            ConfigError: One was not; names the nearest that was.
        """
        for name in self._values:
            if name not in self._asked:
                raise ConfigError(
                    f"format {format_name} has no option {name!r}:"
                    f" {_suggest(name, (*self._asked.values(), *_PROTOCOL_NAMES))}it asks for"
                    f" {', '.join(sorted(self._asked.values())) or 'none'}"
                )


class MissingOption(KeyError):
    """Raised when an option is asked for that was not given."""


def own_sink(
    format_name: str, make_sink: Callable[[Mapping[str, str]], Sink], given: Mapping[str, str]
) -> Sink:
    """Return what `make_sink` makes of the options of `given` that are not the protocol's.

    Raises:
        ConfigError: An option that it asks for is missing, or one is given that it never asks for.
    """
    options = SinkOptions(given)
    try:
        sink = make_sink(options)
    except MissingOption as error:
        raise ConfigError(f"format {format_name} needs option {error.args[0]!r}") from None
    options.require_all_asked(format_name)
    return sink
