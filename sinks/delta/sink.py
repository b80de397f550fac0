"""The sink for Delta Lake tables that users configure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from typing_extensions import override

from onceflow.core import spi
from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.spi.bad_rows import BadRows
from onceflow.core.spi.options import document_options, option
from onceflow.sinks.base.checks import check_sink_id, require_any_column
from onceflow.sinks.delta.location import TableLocation
from onceflow.sinks.lake.committer import read_target_record
from onceflow.sinks.lake.sink import LakeSink
from onceflow.sinks.lake.writer import LakeChangeWriter, LakeWriter, RefusedRows, TableColumns

if TYPE_CHECKING:  # a program without the extra gets an error that names it
    from deltalake import DeltaTable

_UNSAFE_OPTIONS = frozenset({"aws_s3_allow_unsafe_rename", "allow_unsafe_rename"})


@document_options
@check_fields
@dataclass(frozen=True, kw_only=True, repr=False)
class DeltaSink(LakeSink):
    """Appends rows to a Delta Lake table, each exactly once: one version a checkpoint.

    Subtasks write Parquet files into the table's directory; the driver makes one version of those
    of a checkpoint. Pickles with its storage options, prints without them.

    Raises:
        ConfigError: A setting is wrong by itself; what needs the storage is found by `validate`.
    """

    url: str = field(
        kw_only=False,
        metadata=option(
            "The table: a directory that driver and executors share, or `s3://…`, `gs://…`,"
            " `az://…`, `abfss://…`"
        ),
    )
    storage_options: Mapping[str, str] = field(
        default_factory=dict[str, str],
        metadata=option(
            "deltalake's options for the storage: credentials, endpoint. A value may refer to a"
            " secret: `${env:NAME}` or `${file:/path}`",
            secret=True,
        ),
    )
    create: bool = field(default=False, metadata=option("Create the table from the rows' columns"))
    partition_by: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "Partition columns of a table that is created. An existing table keeps its own"
        ),
    )
    properties: Mapping[str, str] = field(
        default_factory=dict[str, str],
        metadata=option(
            "Table properties of a table that is created, such as `delta.logRetentionDuration`"
        ),
    )
    evolve: bool = field(
        default=False, metadata=option("Add columns that the table lacks, at each start")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting in ("partition_by", "properties"):
            if getattr(self, setting) and not self.create:
                raise ConfigError(
                    f"{setting} is only for a table that the sink creates; add create=True"
                )
        unsafe = [name for name in self.storage_options if name.lower() in _UNSAFE_OPTIONS]
        if unsafe:
            raise ConfigError(
                f"storage option {unsafe[0]!r}: two drivers could write the same version, and"
                " one of them would be lost; leave the option out: deltalake then commits by a"
                " conditional write"
            )
        # Make the path absolute now, because executors may have another working directory.
        url = self.url.removeprefix("file://")
        object.__setattr__(self, "url", url if "://" in url else str(Path(url).resolve()))
        object.__setattr__(self, "partition_by", tuple(self.partition_by))

    @override
    def __repr__(self) -> str:
        return f"DeltaSink({self.url!r})"

    @override
    def validate(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        check_sink_id(context.sink_id)
        self._location.require_library()
        from onceflow.sinks.delta import layout

        rows = self.rules.select_table_columns(schema)
        require_any_column(rows)
        if self.upserts:
            layout.check_names(self._location, rows)
        table = self._location.find_table()
        if table is not None:
            layout.check_table(self._location, table)
            if self.upserts:
                layout.check_replaceable(self._location, table)
            added = {column.name for column in layout.find_new_columns(self._location, table, rows)}
            known = [column for column in rows if not (self.evolve and column.name in added)]
            layout.make_columns(str(self._location), table, pa.schema(known))
        elif self.create:
            layout.make_schema(self._location, rows, self.partition_by)
        else:
            raise ConfigError(f"{self._location} does not exist; create it, or set create=True")

    @override
    def open(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        """Create or evolve the table, if the user configured that, and claim the sink id."""
        self.validate(context, schema)
        from onceflow.sinks.delta import layout
        from onceflow.sinks.delta.table import DeltaLakeTable

        rows = self.rules.select_table_columns(schema)
        if self.create:
            layout.create_table(self._location, rows, self.partition_by, self.properties)
        table = DeltaLakeTable(self._location, context.sink_id)
        if self.evolve:
            layout.evolve_table(self._location, table.load().table, rows)
        self.claim(table, context)

    @override
    def target_record(self, context: spi.CommitterContext) -> TargetRecord:
        self._location.require_library()
        from onceflow.sinks.delta.table import DeltaLakeTable

        if self._location.find_table() is None:
            return TargetRecord(context.sink_id)
        version = DeltaLakeTable(self._location, context.sink_id).load()
        return read_target_record(version, context)

    @override
    def writer(self, context: spi.WriterContext) -> spi.SinkWriter:
        from onceflow.sinks.delta.data_files import DeltaDataFiles

        bad_rows = BadRows(context.on_bad_row, context.schema, where=f"sink {context.sink_id}")
        table = self._load(context)
        columns = self._make_columns(table, context)
        refused = RefusedRows(
            bad_rows, columns, lambda: self._make_columns(self._load(context), context)
        )
        if self.upserts:
            table_id = str(table.metadata().id)
            return LakeChangeWriter(context, self.rules, table_id, refused)
        files = DeltaDataFiles(self._location, table, context, refused)
        return LakeWriter(context, files, refused)

    def _load(self, context: spi.WriterContext) -> DeltaTable:
        from onceflow.sinks.delta.table import DeltaLakeTable

        return DeltaLakeTable(self._location, context.sink_id).load().table

    def _make_columns(self, table: DeltaTable, context: spi.WriterContext) -> TableColumns:
        """Return the conversion of a writer's rows to rows of the table.

        Raises:
            ConfigError: The rows cannot go into the table.
        """
        from onceflow.sinks.delta.layout import list_merge_rules, make_columns

        rows = self.rules.select_table_columns(context.schema)
        merge_rules = list(list_merge_rules(table)) if self.upserts else []
        return make_columns(str(self._location), table, rows, merge_rules)

    @override
    def committer(self, context: spi.CommitterContext) -> spi.GlobalCommitter:
        from onceflow.sinks.delta.table import DeltaLakeTable

        return self.make_committer(DeltaLakeTable(self._location, context.sink_id), context)

    @property
    def _location(self) -> TableLocation:
        return TableLocation(self.url, self.storage_options)
