"""The reader of connector files, which builds the pipeline that a file describes.

In passwords and tables of client options, a reference to a secret (`${env:NAME}`, `${file:/path}`)
is kept, and the connector resolves it. In every other text it is resolved when the file is read. So
addresses and names may come from the environment, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from onceflow.cli.run.cluster import AnyCluster
from onceflow.cli.run.file.layout import (
    DEAD_LETTERS,
    NAME_KEY,
    SECTIONS,
    SPARK,
    WINDOW,
    WINDOWS,
    SinkKeys,
    SourceKeys,
    StepKeys,
    parse_aggregates,
    parse_orders,
)
from onceflow.cli.run.file.parameters import (
    check_names,
    list_parameters,
    parse_arguments,
    parse_record,
)
from onceflow.connectors.catalog import SINKS, SOURCES
from onceflow.core.api.pipeline import Pipeline
from onceflow.core.api.stream import KeyedStream, Stream
from onceflow.core.errors import ConfigError
from onceflow.core.plan.event_time import WatermarkStrategy
from onceflow.core.secret_references import follow_references, has_reference
from onceflow.core.settings.configuration import Configuration
from onceflow.core.settings.configuration_file import WrittenSetting, flatten_table, parse_toml
from onceflow.core.settings.known_settings import OPTIONS
from onceflow.core.spi import Sink, Source
from onceflow.core.spi.connector import SinkConnector, SourceConnector

Table: TypeAlias = dict[str, object]
_T = TypeVar("_T")
_UNKNOWN_REFERENCE = re.compile(r"\$\{(?!env:|file:)(\w+)\}")
_PASSWORD = re.compile(r"://[^/@]*:[^/@]*\$\{[^}]*\}[^/]*@|password=\$\{")


@dataclass(frozen=True, slots=True)
class ConnectorFile:
    """The content of a connector file. Values are checked when the pipeline is built."""

    path: Path
    name: str
    sources: Mapping[str, Table]
    steps: Mapping[str, Table]
    sinks: Mapping[str, Table]
    spark: Mapping[str, str] = field(default_factory=dict[str, str])
    """The settings of Spark by their full names."""
    settings: tuple[WrittenSetting, ...] = ()

    @property
    def master(self) -> str | None:
        """The Spark master, or None if the file does not set it."""
        return self.spark.get("spark.master")

    def build(self, cluster: AnyCluster) -> Pipeline:
        """Build the pipeline on `cluster`.

        Raises:
            ConfigError: A name or a value is wrong. The message has the table and a similar name.
        """
        configuration = Configuration.load(written=self.settings)
        pipeline = Pipeline(cluster, name=self.name, config=configuration)
        streams = _Streams()
        for uid, table in self.sources.items():
            for name, stream in self._read(pipeline, uid, table).items():
                streams.add_source(name, stream)
        for uid, table in self.steps.items():
            streams.add_step(uid, self._apply(streams, uid, table))
        for uid, table in self.sinks.items():
            self._write(streams, uid, table)
        return pipeline

    def _read(self, pipeline: Pipeline, uid: str, table: Table) -> Mapping[str, Stream]:
        """Return the streams of a source by their names in the file."""
        where = f"{self.path}: sources.{uid}"
        keys, letters, options = _split(table, SourceKeys, where)
        # Bind here, so that a server that has the schemas is asked only once.
        source = _make_source(keys.connector, options, where).bind(self.name, uid)
        dead_letters = _make_letters(letters, where)
        outputs = _name_table(where, lambda: source.outputs)
        if not outputs:
            if keys.output_watermarks is not None:
                raise ConfigError(
                    f"{where}: output_watermarks belongs to a source with several outputs; write"
                    " watermarks"
                )
            stream = _name_table(
                where,
                lambda: pipeline.read(
                    source, uid=uid, dead_letters=dead_letters, watermarks=keys.watermarks
                ),
            )
            return {uid: stream}
        if keys.watermarks is not None:
            raise ConfigError(
                f"{where}: the source has the outputs {', '.join(outputs)}; write"
                " output_watermarks, a table with the column of each output"
            )
        watermarks = {
            output: parse_record(WatermarkStrategy, written, f"{where}.output_watermarks.{output}")
            for output, written in (keys.output_watermarks or {}).items()
        }
        streams = _name_table(
            where,
            lambda: pipeline.read_outputs(
                source, uid=uid, dead_letters=dead_letters, watermarks=watermarks
            ),
        )
        return {f"{uid}.{output}": stream for output, stream in streams.items()}

    def _apply(self, streams: _Streams, uid: str, table: Table) -> Stream:
        where = f"{self.path}: steps.{uid}"
        window = table.get(WINDOW)
        names = [*list_parameters(StepKeys), WINDOW]
        check_names(list(table), names, where)
        keys, _, _ = _split({k: v for k, v in table.items() if k != WINDOW}, StepKeys, where)
        stream = streams.find(keys.input, where)
        return _name_table(where, lambda: _apply_step(stream, keys, window, uid, where))

    def _write(self, streams: _Streams, uid: str, table: Table) -> None:
        where = f"{self.path}: sinks.{uid}"
        keys, letters, options = _split(table, SinkKeys, where)
        sink = _make_sink(keys.connector, options, where)
        stream = streams.find(keys.input, where)
        _name_table(
            where,
            lambda: stream.write(
                sink,
                uid=uid,
                sink_id=keys.sink_id,
                on_bad_row=keys.on_bad_row,
                dead_letters=_make_letters(letters, where),
            ),
        )


def read_connector_file(path: Path) -> ConnectorFile:
    """Read the connector file at `path`.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or has an unknown table.
    """
    try:
        tables = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"connector file {path}: {error.strerror}") from None
    except ValueError as error:  # UnicodeDecodeError is one, too
        raise ConfigError(f"connector file {path} is not TOML: {error}") from None
    where = str(path)
    # Check only the names of tables here. The code for settings checks their tables, with the same
    # errors as for any other file.
    sections = sorted({option.name.partition(".")[0] for option in OPTIONS})
    check_names(
        [name for name, value in tables.items() if isinstance(value, dict) or name == NAME_KEY],
        [NAME_KEY, *SECTIONS, SPARK, *sections, *_flink_sections()],
        where,
    )
    # Remove the known tables one after the other. The remaining tables are settings.
    name = tables.pop(NAME_KEY, None)
    if not isinstance(name, str):
        raise ConfigError(f'{where}: name must be given, at the top: name = "ledger"')
    sources, steps, sinks = (_take_tables(tables, section, where) for section in SECTIONS)
    if not sources or not sinks:
        missing = "sources" if not sources else "sinks"
        raise ConfigError(
            f"{where}: the table [{missing}.NAME] is missing; a file has at least one source and"
            " one sink"
        )
    spark = dict(flatten_table(_take_table(tables, SPARK, where), "spark."))
    settings = tuple(
        WrittenSetting(setting, f"file {path}", _follow(value, f"{where}: {setting}"))
        for setting, value in flatten_table(tables, "")
    )
    return ConnectorFile(
        path,
        name,
        sources,
        steps,
        sinks,
        {key: _to_spark(value) for key, value in spark.items()},
        settings,
    )


def _flink_sections() -> list[str]:
    return sorted({name.partition(".")[0] for option in OPTIONS for name in option.flink})


def _take_tables(tables: Table, section: str, where: str) -> dict[str, Table]:
    by_uid = _take_table(tables, section, where)
    for uid, table in by_uid.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {section}.{uid} must be a table: [{section}.{uid}]")
    return cast("dict[str, Table]", by_uid)


def _take_table(tables: Table, name: str, where: str) -> Table:
    table = tables.pop(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {name} must be a table: [{name}]")
    return cast("Table", table)


def _to_spark(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name_table(where: str, make: Callable[[], _T]) -> _T:
    """Return the result of `make`. Add the table's name to a ConfigError."""
    try:
        return make()
    except ConfigError as error:
        text = str(error)
        # The error of a nested table already has the location.
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from None


class _Streams:
    """The streams that steps and sinks may use as input, in the order of the file."""

    def __init__(self) -> None:
        self._by_uid: dict[str, Stream] = {}
        self._sources: list[str] = []
        self._last_step: str | None = None

    def add_source(self, uid: str, stream: Stream) -> None:
        self._by_uid[uid] = stream
        self._sources.append(uid)

    def add_step(self, uid: str, stream: Stream) -> None:
        self._by_uid[uid] = stream
        self._last_step = uid

    def find(self, names: Sequence[str] | None, where: str) -> Stream:
        """Return the union of the streams `names`. Default: the last step, or the only source.

        Raises:
            ConfigError: No earlier stream has the name, or there are several sources and no name is
                given.
        """
        if names is None:
            return self._by_uid[self._find_default(where)]
        check_names(names, list(self._by_uid), f"{where}.input")
        first, *others = (self._by_uid[name] for name in names)
        return first.union(*others) if others else first

    def _find_default(self, where: str) -> str:
        if self._last_step is not None:
            return self._last_step
        if len(self._sources) == 1:
            return self._sources[0]
        raise ConfigError(
            f"{where}: input must be given, since there are several streams:"
            f" {', '.join(self._sources)}"
        )


def _split(table: Table, kind: type[_T], where: str) -> tuple[_T, object, Table]:
    """Split a table into the file's own keys, the dead letters, and the connector's options."""
    parameters = list_parameters(kind)
    own = {name: value for name, value in table.items() if name in parameters}
    options = {
        name: value
        for name, value in table.items()
        if name not in parameters and name != DEAD_LETTERS
    }
    followed = {name: _follow(value, f"{where}.{name}") for name, value in own.items()}
    return kind(**parse_arguments(parameters, followed, where)), table.get(DEAD_LETTERS), options


# --- connectors ----------------------------------------------------------------------------------


def _make_source(name: str | None, table: Table, where: str) -> Source:
    connector = _name_table(where, lambda: _find_source(name, table, where))
    arguments = _parse_options(connector, connector.source, table, where)
    return _name_table(where, lambda: connector.source(**arguments))


def _find_source(name: str | None, table: Table, where: str) -> SourceConnector:
    if name is not None:
        return SOURCES.find(name)
    return SOURCES.find_by_url(_read_url(table, SOURCES.names(), where))


def _make_letters(table: object, where: str) -> Sink | None:
    if table is None:
        return None
    where = f"{where}.{DEAD_LETTERS}"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table: the sink that takes them")
    options = dict(cast("Table", table))
    name = options.pop("connector", None)
    if not isinstance(name, str | None):
        raise ConfigError(f"{where}: connector={name!r} must be text")
    return _make_sink(name, options, where)


def _make_sink(name: str | None, table: Table, where: str) -> Sink:
    connector = _name_table(where, lambda: _find_sink(name, table, where))
    arguments = _parse_options(connector, connector.sink, table, where)
    return _name_table(where, lambda: connector.sink(**arguments))


def _find_sink(name: str | None, table: Table, where: str) -> SinkConnector:
    if name is not None:
        return SINKS.find(name)
    return SINKS.find_by_url(_read_url(table, SINKS.names(), where))


def _read_url(table: Table, names: Sequence[str], where: str) -> str:
    url = table.get("url")
    if not isinstance(url, str):
        raise ConfigError(f"{where}: connector or url must be given; there are {', '.join(names)}")
    return cast("str", _follow(url, f"{where}.url"))


def _parse_options(
    connector: SourceConnector | SinkConnector,
    kind: Callable[..., object],
    table: Table,
    where: str,
) -> dict[str, Any]:
    parameters = list_parameters(kind)
    table = dict(table)
    read_url = connector.read_url
    if "url" in table and "url" not in parameters and read_url is not None:
        url = _read_url(table, (), where)
        del table["url"]
        of_url = _name_table(where, lambda: read_url(url))
        if twice := sorted(of_url.keys() & table.keys()):
            raise ConfigError(f"{where}: the url already contains {', '.join(twice)}; omit it here")
        table |= of_url
    followed = {
        name: value
        # A secret stays a reference until the process that connects resolves it, so that neither
        # the plan nor a pickle contains it.
        if name in parameters and parameters[name].keeps_references
        else _follow(value, f"{where}.{name}")
        for name, value in table.items()
    }
    return parse_arguments(parameters, followed, where)


def _follow(value: object, where: str) -> object:
    """Return `value` with all references in its texts resolved, recursively."""
    match value:
        case str():
            return _follow_text(value, where)
        case list():
            return [_follow(item, where) for item in cast("list[object]", value)]
        case dict():
            table = cast("Table", value)
            return {name: _follow(entry, f"{where}.{name}") for name, entry in table.items()}
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


# --- steps ---------------------------------------------------------------------------------------


def _apply_step(stream: Stream, keys: StepKeys, window: object, uid: str, where: str) -> Stream:
    kinds = {
        "sql": keys.sql,
        "filter or select": keys.filter or keys.select,
        "running": keys.running,
        "over": keys.over,
        "deduplicate": keys.deduplicate,
        "top_n": keys.top_n,
        "window": window,
    }
    given = [kind for kind, value in kinds.items() if value is not None]
    if len(given) != 1:
        what = f"{' and '.join(given)} are" if given else "nothing is"
        raise ConfigError(f"{where}: {what} given; a step is one of {', '.join(kinds)}")
    _check_keys(given[0], keys, where)
    if window is not None:
        return _apply_window(stream, keys, window, uid, where)
    if given[0] in _KEYS_OF:
        return _apply_keyed_step(stream.key_by(*(keys.key_by or ())), given[0], keys, uid, where)
    if keys.sql is not None:
        return stream.sql(keys.sql, uid=uid)
    columns = ", ".join(keys.select or ("*",))
    condition = f" WHERE {keys.filter}" if keys.filter else ""
    return stream.sql(f"SELECT {columns} FROM stream{condition}", uid=uid)


def _apply_keyed_step(
    stream: KeyedStream, kind: str, keys: StepKeys, uid: str, where: str
) -> Stream:
    """Return the stream of a step that has a key and no window."""
    by = parse_orders(keys.by or ())
    match kind:
        case "running":
            aggregates = parse_aggregates(keys.running or {}, f"{where}.running")
            return stream.running(uid=uid, ttl=keys.ttl, emit=keys.emit or "record", **aggregates)
        case "over":
            if keys.rows is None:
                raise ConfigError(f"{where}: over needs rows, the number of records")
            aggregates = parse_aggregates(keys.over or {}, f"{where}.over")
            emit = keys.emit or "record"
            return stream.over(
                keys.rows, by=by or None, ttl=keys.ttl, emit=emit, uid=uid, **aggregates
            )
        case "top_n":
            return stream.top_n(keys.top_n or 0, by=by, rank=keys.rank or "rank", uid=uid)
        case _:
            if len(by) > 1 or not all(isinstance(order, str) for order in by):
                raise ConfigError(
                    f"{where}: deduplicate takes one column in by, without DESC; keep first or last"
                )
            column = str(by[0]) if by else None
            keep = keys.deduplicate or ""
            return stream.deduplicate(keep=keep, by=column, ttl=keys.ttl, uid=uid)


_KEYS_OF = {
    "running": {"key_by", "ttl", "emit"},
    "over": {"key_by", "rows", "by", "ttl", "emit"},
    "deduplicate": {"key_by", "by", "ttl"},
    "top_n": {"key_by", "by", "rank"},
    "window": {
        *("key_by", "time", "allowed_lateness", "aggregate", "early_records", "early_interval"),
    },
}


def _check_keys(kind: str, keys: StepKeys, where: str) -> None:
    """Raise ConfigError if a key is given that belongs to another kind of step."""
    allowed = _KEYS_OF.get(kind, set[str]())
    for name in dict.fromkeys(name for names in _KEYS_OF.values() for name in sorted(names)):
        if getattr(keys, name) not in (None, 0.0) and name not in allowed:
            owners = " or ".join(owner for owner, names in _KEYS_OF.items() if name in names)
            raise ConfigError(
                f"{where}: {name} belongs to a step with {owners}, and this step is {kind}; remove"
                f" {name}"
            )
    if "key_by" in allowed and not keys.key_by and kind != "window":
        raise ConfigError(f"{where}: {kind} needs key_by, the columns of the key")


def _apply_window(stream: Stream, keys: StepKeys, window: object, uid: str, where: str) -> Stream:
    if not isinstance(window, dict):
        raise ConfigError(f"{where}.window must be a table with type: {', '.join(WINDOWS)}")
    table = dict(cast("Table", window))
    name = table.pop("type", None)
    check_names([str(name)], list(WINDOWS), f"{where}.window.type")
    assigner = parse_record(WINDOWS[str(name)], table, f"{where}.window")
    aggregates = parse_aggregates(keys.aggregate or {}, f"{where}.aggregate")
    time, lateness = keys.time, keys.allowed_lateness
    early = {"early_records": keys.early_records, "early_interval": keys.early_interval}
    if not keys.key_by:
        for name, value in early.items():
            if value is not None:
                raise ConfigError(f"{where}: {name} needs key_by, the columns of the key")
        together = stream.window_all(assigner, time=time, allowed_lateness=lateness)
        return together.aggregate(uid=uid, **aggregates)
    windowed = stream.key_by(*keys.key_by).window(
        assigner,
        time=time,
        allowed_lateness=lateness,
        early_records=keys.early_records,
        early_interval=keys.early_interval,
    )
    return windowed.aggregate(uid=uid, **aggregates)
