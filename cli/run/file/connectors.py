"""The connectors of a connector file: the tables of sources, sinks, dead letters and lookups."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from onceflow.cli.run.file.layout import DEAD_LETTERS
from onceflow.cli.run.file.parameters import check_names, list_parameters, parse_arguments
from onceflow.connectors.catalog import LOOKUPS, SINKS, SOURCES, ConnectorCatalog
from onceflow.core.errors import ConfigError
from onceflow.core.secret_references import follow_references, has_reference
from onceflow.core.spi import Sink, Source
from onceflow.core.spi.connector import LookupConnector, SinkConnector, SourceConnector
from onceflow.core.spi.lookups import LookupSource

Table: TypeAlias = dict[str, object]
_T = TypeVar("_T")
_ConnectorT = TypeVar("_ConnectorT", SourceConnector, SinkConnector, LookupConnector)
_UNKNOWN_REFERENCE = re.compile(r"\$\{(?!env:|file:)(\w+)\}")
_PASSWORD = re.compile(r"://[^/@]*:[^/@]*\$\{[^}]*\}[^/]*@|password=\$\{")


def name_table(where: str, make: Callable[[], _T]) -> _T:
    """Return the result of `make`. Add `where`, the name of the table, to a ConfigError."""
    try:
        return make()
    except ConfigError as error:
        text = str(error)
        # The error of a nested table already has the location.
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from None


def split_table(table: Table, kind: type[_T], where: str) -> tuple[_T, object, Table]:
    """Split a table into the file's own keys, the dead letters, and the connector's options.

    Raises:
        ConfigError: A key of the file has an invalid value.
    """
    parameters = list_parameters(kind)
    own = {name: value for name, value in table.items() if name in parameters}
    options = {
        name: value
        for name, value in table.items()
        if name not in parameters and name != DEAD_LETTERS
    }
    followed = {name: follow(value, f"{where}.{name}") for name, value in own.items()}
    return kind(**parse_arguments(parameters, followed, where)), table.get(DEAD_LETTERS), options


def make_source(name: str | None, table: Table, where: str) -> Source:
    """Return the source of the connector `name`, or of the URL in `table`.

    Raises:
        ConfigError: There is no such connector, or an option is invalid. The message has `where`.
    """
    connector = _find(SOURCES, name, table, where)
    arguments = _parse_options(connector.source, connector.read_url, table, where)
    return name_table(where, lambda: connector.source(**arguments))


def make_letters(table: object, where: str) -> Sink | None:
    """Return the sink of dead letters, or None if `table` is None.

    Raises:
        ConfigError: `table` is no table, or as in `make_source`.
    """
    if table is None:
        return None
    where = f"{where}.{DEAD_LETTERS}"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table: the sink that takes them")
    options = dict(cast("Table", table))
    name = options.pop("connector", None)
    if not isinstance(name, str | None):
        raise ConfigError(f"{where}: connector={name!r} must be text")
    return make_sink(name, options, where)


def make_sink(name: str | None, table: Table, where: str) -> Sink:
    """Return the sink of the connector `name`, or of the URL in `table`.

    Raises:
        ConfigError: As in `make_source`.
    """
    connector = _find(SINKS, name, table, where)
    arguments = _parse_options(connector.sink, connector.read_url, table, where)
    return name_table(where, lambda: connector.sink(**arguments))


def make_lookup(name: str | None, table: Table, where: str) -> LookupSource:
    """Return the table that `table` describes, which records are joined with.

    Raises:
        ConfigError: As in `make_source`.
    """
    connector = _find(LOOKUPS, name, table, where)
    arguments = _parse_options(connector.lookup, None, table, where)
    return name_table(where, lambda: connector.lookup(**arguments))


def _find(
    catalog: ConnectorCatalog[_ConnectorT], name: str | None, table: Table, where: str
) -> _ConnectorT:
    if name is not None:
        return name_table(where, lambda: catalog.find(name))
    url = _read_url(table, catalog.names(), where)
    return name_table(where, lambda: catalog.find_by_url(url))


def _read_url(table: Table, names: Sequence[str], where: str) -> str:
    url = table.get("url")
    if not isinstance(url, str):
        raise ConfigError(f"{where}: connector or url must be given; there are {', '.join(names)}")
    return cast("str", follow(url, f"{where}.url"))


def _parse_options(
    kind: Callable[..., object],
    read_url: Callable[[str], Mapping[str, object]] | None,
    table: Table,
    where: str,
) -> dict[str, Any]:
    parameters = list_parameters(kind)
    table = dict(table)
    if "url" in table and "url" not in parameters and read_url is not None:
        url = _read_url(table, (), where)
        del table["url"]
        of_url = name_table(where, lambda: read_url(url))
        if twice := sorted(of_url.keys() & table.keys()):
            raise ConfigError(f"{where}: the url already contains {', '.join(twice)}; omit it here")
        table |= of_url
    # A misspelled name is reported before a secret under it is looked up.
    check_names(list(table), list(parameters), where)
    followed = {
        name: value
        # A secret stays a reference until the process that connects resolves it, so that neither
        # the plan nor a pickle contains it.
        if name in parameters and parameters[name].keeps_references
        else follow(value, f"{where}.{name}")
        for name, value in table.items()
    }
    return parse_arguments(parameters, followed, where)


def follow(value: object, where: str) -> object:
    """Return `value` with all references in its texts resolved, recursively.

    Raises:
        ConfigError: A reference is unknown or cannot be resolved, or a URL contains a password.
    """
    match value:
        case str():
            return _follow_text(value, where)
        case list():
            return [follow(item, where) for item in cast("list[object]", value)]
        case dict():
            table = cast("Table", value)
            return {name: follow(entry, f"{where}.{name}") for name, entry in table.items()}
        case _:
            return value


def _follow_text(text: str, where: str) -> str:
    if unknown := _UNKNOWN_REFERENCE.search(text):
        raise ConfigError(
            f"{where}: {unknown[0]} is not a known reference; write ${{env:{unknown[1]}}} for an"
            " environment variable, ${file:/path} for a file"
        )
    # Check before resolving the reference: afterwards the password would be plain text in an object
    # that is printed and pickled.
    if has_reference(text) and _PASSWORD.search(text):
        raise ConfigError(
            f"{where}: the password in this URL would be in every description of the job. Write"
            ' password = "${env:NAME}" next to the URL instead; each process looks it up itself'
        )
    return follow_references(text, setting=where)
