"""`OptionTable`, which reads the options of one Spark format and says what is wrong with them.

It is made of a description's fields: those of the dataclass of a sink or a source
(`core.spi.options`), which the options that are given become.

Spark passes names in lower case, so case never counts. An option is read by its table only. A value
that refers to a secret (`${env:NAME}`, `${file:/path}`) is passed on as it is: whoever connects
follows it.
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
    """One option of a format."""

    name: str
    """The option's name as the documents write it."""
    argument: str
    """The field that it sets."""
    meaning: OptionMeaning
    default: object
    """What holds where it is not given; `dataclasses.MISSING` where it is needed."""


@dataclass(frozen=True, kw_only=True)
class OptionTable(Generic[T_co]):
    """All options of one format in one direction."""

    format: str
    direction: str
    """`write`, `read` or `readStream`, for errors."""
    description: type[T_co]
    """The dataclass that the options make; its fields say what Spark calls them."""
    without: tuple[str, ...] = ()
    """Fields that are no options here."""
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    """Where the format's default is another than the description's."""
    first: tuple[str, ...] = ()
    """Fields that are listed right after the needed ones: one of them is needed."""
    helps: Mapping[str, str] = field(default_factory=dict[str, str])
    """What a field means here, where the description says it of pipelines."""
    named: Mapping[str, str] = field(default_factory=dict[str, str])
    """What else the description's errors call an option, and how it is called here."""
    instead: Mapping[str, str] = field(default_factory=dict[str, str])
    """What its errors say of things that a format has not, and what is said here."""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Options that other formats have, and what to do instead."""
    ignored: Mapping[str, str] = field(default_factory=dict[str, str])
    """Options of other formats that change nothing here, and why."""

    @cached_property
    def options(self) -> tuple[SparkOption, ...]:
        """All options but those of clients: the needed ones, then in the order of the fields."""
        options = (one for one in self._list_all() if not one.name.endswith("*"))
        return tuple(sorted(options, key=self._rank))

    def _rank(self, option: SparkOption) -> int:
        if option.default is MISSING:
            return 0
        return 1 + (*self.first, option.argument).index(option.argument)

    @cached_property
    def clients(self) -> Mapping[str, SparkOption]:
        """Options that begin with a key are a client's: it becomes a mapping without the key."""
        return {
            one.name.removesuffix("*"): one for one in self._list_all() if one.name.endswith("*")
        }

    def _list_all(self) -> Iterator[SparkOption]:
        declared = {one.name: one.default for one in fields(cast("Any", self.description))}
        for argument, meaning in list_options(self.description):
            if meaning.spark and argument not in self.without:
                default = self.defaults.get(argument, declared[argument])
                yield SparkOption(meaning.spark, argument, meaning, default)

    def help_of(self, one: SparkOption) -> str:
        """Return what an option means, in the words of options."""
        return self.helps.get(one.argument) or self.words.spoken(one.meaning.help)

    def make(self, given: Mapping[str, str]) -> T_co:
        """Return the description that `given` makes.

        Raises:
            ConfigError: As `arguments` says; or the description refuses them, in the options'
                words.
        """
        arguments = {**self.defaults, **self.arguments(given)}
        with self.words.translate_errors():
            return self.description(**arguments)

    @property
    def words(self) -> OptionWords:
        """What the description's fields are called here."""
        names = {one.argument: one.name for one in (*self.options, *self.clients.values())}
        return OptionWords({**names, **self.named}, self.instead)

    def arguments(self, given: Mapping[str, str]) -> dict[str, object]:
        """Return the arguments that `given` says; what belongs to the protocol is passed over.

        Raises:
            ConfigError: An option is unknown, of another format or direction, given twice under two
                names, missing, or its value cannot be read.
        """
        known = {
            # Spark keeps the case in which an option was given, and looks it up in any.
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
            elif (prefix := self._prefix_of(name)) is not None:
                client = cast(
                    "dict[str, object]",
                    arguments.setdefault(self.clients[prefix].argument, dict[str, object]()),
                )
                kind = self.clients[prefix].meaning.kind
                # A client's option keeps its case: the client's own names may differ by it. Any of
                # them may be a secret.
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

    def _prefix_of(self, name: str) -> str | None:
        """Return what says which client's option `name` is; None: none's."""
        # A refused name may begin as a client's options do; its advice says more than the client's
        # error.
        if name.lower() in {other.lower() for other in self.refused}:
            return None
        return next((one for one in self.clients if name.lower().startswith(one)), None)

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
        there = ", ".join([*sorted(listed, key=str.lower), *(f"{one}*" for one in self.clients)])
        return (
            f"format {self.format} has no option {name!r} for {self.direction}:"
            f" {_suggest(name, known)}there are {there}"
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
        # Whoever lists all options has asked for all of them.
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
