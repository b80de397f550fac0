"""The reader of connector files, which builds the pipeline that a file describes.

In passwords and tables of client options, a reference to a secret (`${env:NAME}`, `${file:/path}`)
is kept, and the connector resolves it. In every other text it is resolved when the file is read. So
addresses and names may come from the environment, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from onceflow.cli.run.cluster import AnyCluster
from onceflow.cli.run.file.connectors import (
    Table,
    follow,
    make_letters,
    make_sink,
    make_source,
    name_table,
    split_table,
)
from onceflow.cli.run.file.layout import NAME_KEY, SECTIONS, SPARK, SinkKeys, SourceKeys
from onceflow.cli.run.file.parameters import check_names, parse_record
from onceflow.cli.run.file.steps import Streams, apply_step
from onceflow.core.api.pipeline import Pipeline
from onceflow.core.api.stream import Stream
from onceflow.core.errors import ConfigError
from onceflow.core.plan.event_time import WatermarkStrategy
from onceflow.core.settings.configuration import Configuration
from onceflow.core.settings.configuration_file import WrittenSetting, flatten_table, parse_toml
from onceflow.core.settings.known_settings import OPTIONS


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
        streams = Streams()
        for uid, table in self.sources.items():
            for name, stream in self._read(pipeline, uid, table).items():
                streams.add_source(name, stream)
        for uid, table in self.steps.items():
            where = f"{self.path}: steps.{uid}"
            streams.add_step(uid, apply_step(streams, uid, table, where))
        for uid, table in self.sinks.items():
            self._write(streams, uid, table)
        return pipeline

    def _read(self, pipeline: Pipeline, uid: str, table: Table) -> Mapping[str, Stream]:
        """Return the streams of a source by their names in the file."""
        where = f"{self.path}: sources.{uid}"
        keys, letters, options = split_table(table, SourceKeys, where)
        # Bind here, so that a server that has the schemas is asked only once.
        source = make_source(keys.connector, options, where).bind(self.name, uid)
        dead_letters = make_letters(letters, where)
        outputs = name_table(where, lambda: source.outputs)
        if not outputs:
            if keys.output_watermarks is not None:
                raise ConfigError(
                    f"{where}: output_watermarks belongs to a source with several outputs; write"
                    " watermarks"
                )
            stream = name_table(
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
        streams = name_table(
            where,
            lambda: pipeline.read_outputs(
                source, uid=uid, dead_letters=dead_letters, watermarks=watermarks
            ),
        )
        return {f"{uid}.{output}": stream for output, stream in streams.items()}

    def _write(self, streams: Streams, uid: str, table: Table) -> None:
        where = f"{self.path}: sinks.{uid}"
        keys, letters, options = split_table(table, SinkKeys, where)
        sink = make_sink(keys.connector, options, where)
        stream = streams.find(keys.input, where)
        name_table(
            where,
            lambda: stream.write(
                sink,
                uid=uid,
                sink_id=keys.sink_id,
                on_bad_row=keys.on_bad_row,
                dead_letters=make_letters(letters, where),
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
        WrittenSetting(setting, f"file {path}", follow(value, f"{where}: {setting}"))
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
