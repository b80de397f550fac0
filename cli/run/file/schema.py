"""The JSON schema of connector files, built from the descriptions that the reader uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from onceflow.cli.run.file import layout
from onceflow.cli.run.file.parameters import (
    Parameter,
    Schema,
    list_parameters,
    schema_of_table,
)
from onceflow.connectors.catalog import LOOKUPS, SINKS, SOURCES, ConnectorCatalog
from onceflow.core.errors import ConfigError
from onceflow.core.settings.known_settings import OPTIONS, Kind, Option
from onceflow.core.spi.connector import LookupConnector, SinkConnector, SourceConnector

_T = TypeVar("_T", SinkConnector, SourceConnector, LookupConnector)

_TYPE_OF_KIND: Mapping[Kind, Schema] = {
    Kind.DURATION: {"type": ["string", "number"]},
    Kind.SIZE: {"type": ["string", "integer"]},
    Kind.COUNT: {"type": ["integer", "string"]},
    Kind.NUMBER: {"type": ["number", "string"]},
    Kind.FLAG: {"type": "boolean"},
    Kind.TEXT: {"type": "string"},
    Kind.CHOICE: {"type": "string"},
}


def make_schema() -> Schema:
    """Return the schema of files that may use every installed connector."""
    sinks = _list_connectors(SINKS)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A job of onceflow run",
        "type": "object",
        "properties": {
            layout.NAME_KEY: {
                "type": "string",
                "description": (
                    "The job's identity: its checkpoints and transactions are named after it."
                ),
            },
            "sources": _make_tables_schema(_list_sources()),
            "steps": {"type": "object", "additionalProperties": {"$ref": "#/$defs/step"}},
            "sinks": _make_tables_schema(_make_sink(sink, layout.SinkKeys) for sink in sinks),
            layout.SPARK: {"type": "object", "description": "Settings of Spark, without `spark.`."},
            **_make_settings(),
        },
        "required": [layout.NAME_KEY, "sources", "sinks"],
        # Flink's names of settings are accepted, too.
        "additionalProperties": True,
        "$defs": {
            "step": _make_step(),
            "dead_letters": {"anyOf": [_make_sink(sink, None) for sink in sinks]},
        },
    }


def _make_tables_schema(tables: Iterable[Schema]) -> Schema:
    return {"type": "object", "minProperties": 1, "additionalProperties": {"anyOf": list(tables)}}


def _list_connectors(catalog: ConnectorCatalog[_T]) -> list[tuple[tuple[str, ...], _T]]:
    """Return each connector once, with all its names and schemes."""
    names_of: dict[int, list[str]] = {}
    by_id: dict[int, _T] = {}
    for name in catalog.names():
        with suppress(ConfigError):  # skip a connector that cannot be loaded here
            connector = catalog.find(name)
            names_of.setdefault(id(connector), []).append(name)
            by_id[id(connector)] = connector
    return [(tuple(names_of[key]), connector) for key, connector in by_id.items()]


def _list_sources() -> Iterable[Schema]:
    for names, connector in _list_connectors(SOURCES):
        own = dict(list_parameters(layout.SourceKeys))
        options = _with_url(list_parameters(connector.source), connector.read_url)
        table = schema_of_table(own | options)
        table["properties"][layout.DEAD_LETTERS] = {"$ref": "#/$defs/dead_letters"}
        yield _choose(table, names, has_url="url" in options)


def _make_sink(described: tuple[tuple[str, ...], SinkConnector], keys: type[Any] | None) -> Schema:
    names, connector = described
    own = dict(list_parameters(keys or layout.SinkKeys))
    if keys is None:
        own = {"connector": own["connector"]}
    options = _with_url(list_parameters(connector.sink), connector.read_url)
    table = schema_of_table(own | options)
    if keys is not None:
        table["properties"][layout.DEAD_LETTERS] = {"$ref": "#/$defs/dead_letters"}
    return _choose(table, names, has_url="url" in options)


def _with_url(
    options: Mapping[str, Parameter], read_url: Callable[[str], Mapping[str, object]] | None
) -> dict[str, Parameter]:
    if "url" in options or read_url is None:
        return dict(options)
    # Options that the url contains are not required.
    freed = {
        name: Parameter(
            name, option.hint, option.default, is_required=False, meaning=option.meaning
        )
        for name, option in options.items()
    }
    return freed | {"url": Parameter("url", str, None, is_required=False, meaning=None)}


def _choose(table: Schema, names: tuple[str, ...], *, has_url: bool) -> Schema:
    """Restrict `table` to the connector of these names, given by `connector` or the url."""
    table["properties"]["connector"] |= {"enum": list(names)}
    if not has_url:
        table["required"].append("connector")
        return table
    schemes = "|".join(names)
    by_url = {
        "properties": {"url": {"pattern": rf"^((jdbc:)?({schemes})(\+\w+)?://|\$\{{)"}},
        "required": ["url"],
    }
    return table | {"anyOf": [{"required": ["connector"]}, by_url]}


def _make_step() -> Schema:
    table = schema_of_table(list_parameters(layout.StepKeys))
    table["properties"][layout.WINDOW] = {
        "anyOf": [_make_window(name, kind) for name, kind in layout.WINDOWS.items()]
    }
    table["properties"][layout.LOOKUP_JOIN] = {"anyOf": list(_list_lookups())}
    kinds = (
        *("sql", "running", "over", "deduplicate", "top_n", "filter", "select"),
        *(layout.WINDOW, layout.LOOKUP_JOIN),
    )
    return table | {"anyOf": [{"required": [kind]} for kind in kinds]}


def _list_lookups() -> Iterable[Schema]:
    own = list_parameters(layout.LookupKeys)
    for names, connector in _list_connectors(LOOKUPS):
        options = list_parameters(connector.lookup)
        yield _choose(schema_of_table({**own, **options}), names, has_url="url" in options)


def _make_window(name: str, kind: type[Any]) -> Schema:
    table = schema_of_table(list_parameters(kind))
    table["properties"]["type"] = {"const": name}
    table["required"].append("type")
    return table


def _make_settings() -> dict[str, Schema]:
    """Return the schemas of the settings' sections, under onceflow's names."""
    sections: dict[str, Schema] = {}
    for option in OPTIONS:
        *parents, last = option.name.split(".")
        properties = sections
        for parent in parents:
            section = properties.setdefault(parent, {"type": "object", "properties": {}})
            properties = section["properties"]
        properties[last] = _make_setting(option)
    return sections


def _make_setting(option: Option) -> Schema:
    if option.kind is Kind.CHOICE and not option.open_choice:
        return {"enum": list(option.words)}
    described = f"{option.kind.value[:1].upper()}{option.kind.value[1:]}."
    return _TYPE_OF_KIND[option.kind] | {"description": described}
