"""`OptionTable`, which parses the options of one Spark format and reports errors in them.

A table is built from the fields of a description, the dataclass of a sink or a source
(`core.spi.options`). The given options become an instance of the description.

Spark passes names in lower case, so case is ignored. Only an option's own table reads it. A value
that refers to a secret (`${env:NAME}`, `${file:/path}`) is passed on unchanged. The connecting
process resolves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

from onceflow.connectors.spark.options.words import OptionWords
from onceflow.core.errors import ConfigError
from onceflow.core.spi import Sink
from onceflow.core.spi.options import OptionMeaning, ValueKind, list_options

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class SparkOption:
    """An option of a format."""

    name: str
    """The option's name as in the documents."""
    argument: str
    """The field that the option sets."""
    meaning: OptionMeaning
    default: object
    """The value if the option is not given; `dataclasses.MISSING` if it is required."""


@dataclass(frozen=True, kw_only=True)
class OptionTable(Generic[T_co]):
    """The options of one format in one direction."""

    format: str
    direction: str
    """`write`, `read` or `readStream`, for errors."""
    description: type[T_co]
    """The dataclass that the options create. Its fields have Spark's names for them."""
    without: tuple[str, ...] = ()
    """The fields that are not options here."""
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    """The defaults that differ from the description's."""
    first: tuple[str, ...] = ()
    """The fields to list directly after the required ones. One of these fields is required."""
    helps: Mapping[str, str] = field(default_factory=dict[str, str])
    """The help texts that differ from the description's, by field."""
    named: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other names in the description's errors, and their names as options."""
    instead: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts in errors about things that a format does not have, and their replacements."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """The options of other formats that are refused, with an alternative."""
    ignored: Mapping[str, str] = field(default_factory=dict[str, str])
    """The options of other formats that have no effect here, with the reason."""

    @cached_property
    def options(self) -> tuple[SparkOption, ...]:
        """The options without those of clients: required ones first, then in field order."""
        options = (option for option in self._list_all() if not option.name.endswith("*"))
        return tuple(sorted(options, key=self._rank))

    def _rank(self, option: SparkOption) -> int:
        if option.default is MISSING:
            return 0
        return 1 + (*self.first, option.argument).index(option.argument)

    @cached_property
    def clients(self) -> Mapping[str, SparkOption]:
        """The options of clients by prefix. Each becomes a mapping of names without the prefix."""
        return {
            option.name.removesuffix("*"): option
            for option in self._list_all()
            if option.name.endswith("*")
        }

    def _list_all(self) -> Iterator[SparkOption]:
        declared = {
            declared_field.name: declared_field.default
            for declared_field in fields(cast("Any", self.description))
        }
        for argument, meaning in list_options(self.description):
            if meaning.spark and argument not in self.without:
                default = self.defaults.get(argument, declared[argument])
                yield SparkOption(meaning.spark, argument, meaning, default)

    def help_of(self, option: SparkOption) -> str:
        """Return the help text of an option. It uses the names of Spark options."""
        return self.helps.get(option.argument) or self.words.translate(option.meaning.help)

    def make(self, given: Mapping[str, str]) -> T_co:
        """Return the sink or source description that the options in `given` create.

        Raises:
            ConfigError: See `arguments`; or the description refuses the options, with the names of
                options in the error.
        """
        arguments = {**self.defaults, **self.arguments(given)}
        with self.words.translate_errors():
            return self.description(**arguments)

    @property
    def words(self) -> OptionWords:
        """The name of the Spark option for each field of the description."""
        names = {option.argument: option.name for option in (*self.options, *self.clients.values())}
        return OptionWords({**names, **self.named}, self.instead)

    def arguments(self, given: Mapping[str, str]) -> dict[str, object]:
        """Return the arguments for the options `given`. Options of the protocol are ignored.

        Raises:
            ConfigError: An option is unknown, belongs to another format or direction, is given
                under two names, is missing, or has an invalid value.
        """
        known = {
            # Spark keeps the case of a given option, and finds it in any case.
            name.lower(): option
            for option in self.options
            for name in (option.name, *option.meaning.aliases)
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
                    option.name, option.meaning.kind, text, option.meaning.secret
                )
            elif (prefix := self._find_prefix(name)) is not None:
                client = cast(
                    "dict[str, object]",
                    arguments.setdefault(self.clients[prefix].argument, dict[str, object]()),
                )
                kind = self.clients[prefix].meaning.kind
                # Keep the case of a client's option, because client names may differ only by case.
                # Treat each as a possible secret.
                client[name[len(prefix) :]] = self._value(name, kind, text, secret=True)
            elif not self._is_known_elsewhere(name):
                raise ConfigError(self._unknown(name))
        self._require_needed(arguments)
        return arguments

    def _value(self, name: str, kind: ValueKind, text: str, secret: bool) -> object:
        try:
            return kind.parse(text)
        except (ValueError, ConfigError):
            shown = f"option {name!r}" if secret else f"option {name!r}={text!r}"
            raise ConfigError(f"format {self.format}: {shown} must be {kind.words}") from None

    def _find_prefix(self, name: str) -> str | None:
        """Return the client prefix of the option `name`, or None if it has none."""
        # A refused name may begin like a client's options. Its advice says more than the client's
        # error.
        if name.lower() in {other.lower() for other in self.refused}:
            return None
        return next((prefix for prefix in self.clients if name.lower().startswith(prefix)), None)

    def _is_known_elsewhere(self, name: str) -> bool:
        return name.lower() in {*_RESERVED, *(other.lower() for other in self.ignored)}

    def _require_needed(self, arguments: Mapping[str, object]) -> None:
        for option in self.options:
            if option.default is MISSING and option.argument not in arguments:
                raise ConfigError(
                    f"format {self.format} needs option {option.name!r}: {self.help_of(option)}"
                )

    def _unknown(self, name: str) -> str:
        advice = {other.lower(): text for other, text in self.refused.items()}.get(name.lower())
        if advice is not None:
            return (
                f"format {self.format}: option {name!r} is not taken by {self.direction}: {advice}"
            )
        names = [option.name for option in self.options]
        known = (*names, *self.ignored, *self.refused, *_PROTOCOL_NAMES)
        listed = {*names, *(_PROTOCOL_NAMES if self.direction == "write" else ())}
        there = ", ".join(
            [*sorted(listed, key=str.lower), *(f"{prefix}*" for prefix in self.clients)]
        )
        return (
            f"format {self.format} has no option {name!r} for {self.direction}:"
            f" {_suggest(name, known)}there are {there}"
        )


def _suggest(name: str, names: Iterable[str]) -> str:
    by_lower = {known.lower(): known for known in names}
    near = get_close_matches(name.lower(), by_lower, n=1)
    return f"did you mean {by_lower[near[0]]!r}? " if near else ""


@dataclass(frozen=True, slots=True)
class ProtocolOption:
    """An option of every format that writes. It concerns batches rather than the target."""

    name: str
    says: str


PROTOCOL_OPTIONS: tuple[ProtocolOption, ...] = (
    ProtocolOption(
        "checkpointLocation",
        "Spark's own option, needed by `writeStream`. It identifies the query: each query needs"
        " its own",
    ),
    ProtocolOption("queryName", "Spark's own option"),
    ProtocolOption(
        "sinkId",
        "Name under which the target knows the writes of this query or program; one for each table."
        " Default: made from checkpointLocation, or from table and txnAppId",
    ),
    ProtocolOption(
        "txnAppId",
        "`write` only, with txnVersion: name of the program that writes, to one table or several",
    ),
    ProtocolOption(
        "txnVersion",
        "`write` only, with txnAppId: a number that rises from write to write. A number that was"
        " written to a table is not written to it again",
    ),
    ProtocolOption(
        "onBadRow",
        "What happens to a row that the target can never take. `fail` (the default): the query"
        " ends. `drop`: the row is left out, counted and logged",
    ),
    ProtocolOption(
        "stagingLocation",
        "Where rows wait for their commit if the target cannot prepare them: a path or URL that"
        " driver and executors share. Default for a query: below checkpointLocation. Programs and"
        " queries may share one. Keep it from run to run: [who may change"
        " it](#keep-staginglocation)",
    ),
)
"""The options of the protocol. No table has options with these names."""

_PROTOCOL_NAMES = tuple(option.name for option in PROTOCOL_OPTIONS)
_RESERVED = frozenset(name.lower() for name in _PROTOCOL_NAMES)


def sink_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return the options in `given` that are the sink's own, not those of every format."""
    return {name: value for name, value in given.items() if name.lower() not in _RESERVED}


class SinkOptions(Mapping[str, str]):
    """The options of a user's own sink. Names may have any case.

    The mapping remembers which options the sink has read. A mistyped option is one that the sink
    never reads, so it is found without a table of options.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        """Store the sink's own options."""
        self._values = {name.lower(): value for name, value in sink_options(given).items()}
        self._asked: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        self._asked[name.lower()] = name
        if name.lower() not in self._values:
            raise MissingOption(name)
        return self._values[name.lower()]

    def __iter__(self) -> Iterator[str]:
        # Iterating over all options counts as asking for all of them.
        self._asked.update({name: name for name in self._values if name not in self._asked})
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def require_all_asked(self, format_name: str) -> None:
        """Raise ConfigError if the sink has not read an option that the user gave.

        Raises:
            ConfigError: The sink has not read an option. The message names the most similar option
                that it has read.
        """
        for name in self._values:
            if name not in self._asked:
                raise ConfigError(
                    f"format {format_name} has no option {name!r}:"
                    f" {_suggest(name, (*self._asked.values(), *_PROTOCOL_NAMES))}it asks for"
                    f" {', '.join(sorted(self._asked.values())) or 'none'}"
                )


class MissingOption(KeyError):
    """The error when a sink reads an option that the user did not give."""


def own_sink(
    format_name: str, make_sink: Callable[[Mapping[str, str]], Sink], given: Mapping[str, str]
) -> Sink:
    """Return the sink that `make_sink` creates from its own options.

    Raises:
        ConfigError: An option that `make_sink` asks for is missing, or it never asks for a given
            option.
    """
    options = SinkOptions(given)
    try:
        sink = make_sink(options)
    except MissingOption as error:
        raise ConfigError(f"format {format_name} needs option {error.args[0]!r}") from None
    options.require_all_asked(format_name)
    return sink
