"""The sink for Iceberg tables that users configure."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from onceflow.sinks.iceberg.catalogs import TableAddress
from onceflow.sinks.lake.committer import read_target_record
from onceflow.sinks.lake.sink import LakeSink
from onceflow.sinks.lake.writer import LakeChangeWriter, LakeWriter, RefusedRows, TableColumns

if TYPE_CHECKING:  # a program without the extra gets an error that names it
    from onceflow.sinks.iceberg.table import IcebergTable, IcebergVersion


@document_options
@check_fields
@dataclass(frozen=True, kw_only=True, repr=False)
class IcebergSink(LakeSink):
    """Appends rows to an Iceberg table, each exactly once: one snapshot a checkpoint.

    Subtasks write Parquet files in the table's layout; the driver commits those of a checkpoint as
    one snapshot. Pickles with the catalog's properties, prints without them.

    Raises:
        ConfigError: A setting is wrong by itself; what needs the catalog is found by `validate`.
    """

    table: str | tuple[str, ...] = field(
        kw_only=False,
        metadata=option(
            "Namespaces and name: `shop.orders`, or a tuple of names where one has a dot in it"
        ),
    )
    catalog: Mapping[str, str] = field(
        default_factory=dict[str, str],
        metadata=option(
            "The catalog's properties, as pyiceberg calls them: `uri`, `warehouse`, `type` (`sql`,"
            " `rest`, `glue`, `hive`), `s3.endpoint` and so on. A value may refer to a secret:"
            " `${env:NAME}` or `${file:/path}`. Without any, pyiceberg's own configuration of"
            " `catalog_name` counts",
            secret=True,
        ),
    )
    catalog_name: str = field(
        default="default", metadata=option("The catalog's name; a SQL catalog keeps it with tables")
    )
    branch: str = field(
        default="main", metadata=option("The branch that snapshots go to; it must exist")
    )
    create: bool = field(
        default=False,
        metadata=option("Create the table, and its namespace, from the rows' columns"),
    )
    partition_by: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "Partitions of a table that is created: `country`, `day(at)`, `bucket(16, id)`,"
            " `truncate(4, name)` and so on. An existing table keeps its own"
        ),
    )
    properties: Mapping[str, str] = field(
        default_factory=dict[str, str],
        metadata=option("Table properties of a table that is created"),
    )
    evolve: bool = field(
        default=False,
        metadata=option(
            "Add columns that the table lacks, and widen types as Iceberg allows, at each start"
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = tuple(self.table.split(".")) if isinstance(self.table, str) else tuple(self.table)
        if len(names) < 2 or not all(names):
            raise ConfigError(
                f"table={self.table!r} must be a namespace and a name, such as 'shop.orders'; a"
                " name that has a dot in it goes into a tuple: ('shop', 'a.b')"
            )
        for setting in ("partition_by", "properties"):
            if getattr(self, setting) and not self.create:
                raise ConfigError(
                    f"{setting} is only for a table that the sink creates; add create=True"
                )
        object.__setattr__(self, "table", names)
        object.__setattr__(self, "partition_by", tuple(self.partition_by))

    @override
    def __repr__(self) -> str:
        return f"IcebergSink({'.'.join(self.table)!r}, catalog_name={self.catalog_name!r})"

    @override
    def validate(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        check_sink_id(context.sink_id)
        with self._open_table(context.sink_id) as table:
            from onceflow.sinks.iceberg import layout
            from onceflow.sinks.iceberg.table_rules import refuse_uuids

            rows = self.rules.select_table_columns(schema)
            require_any_column(rows)
            loaded = table.find_table()
            if loaded is not None:
                layout.check_rows(self._address, loaded, rows, evolve=self.evolve)
                refuse_uuids(str(self._address), loaded.schema(), loaded.spec(), self.primary_key)
            elif self.create:
                layout.check_new_table(self._address, rows, self.partition_by)
            else:
                raise ConfigError(
                    f"{self._address} is not in catalog {self.catalog_name!r}; create it, or set"
                    " create=True"
                )

    @override
    def open(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        """Create or evolve the table, if the user configured that, and claim the sink id."""
        self.validate(context, schema)
        with self._open_table(context.sink_id) as table:
            from onceflow.sinks.iceberg import layout

            rows = self.rules.select_table_columns(schema)
            if self.create:
                layout.create_table(
                    self._address, table.catalog, rows, self.partition_by, self.properties
                )
            if self.evolve:
                layout.evolve_table(self._address, table, rows)
            self.claim(table, context)

    @override
    def target_record(self, context: spi.CommitterContext) -> TargetRecord:
        with self._open_table(context.sink_id) as table:
            if table.find_table() is None:
                return TargetRecord(context.sink_id)
            return read_target_record(table.load(), context)

    @override
    def writer(self, context: spi.WriterContext) -> spi.SinkWriter:
        from onceflow.sinks.iceberg.data_files import IcebergDataFiles

        bad_rows = BadRows(context.on_bad_row, context.schema, where=f"sink {context.sink_id}")
        version = self._load(context)
        columns = self._make_columns(version, context)
        refused = RefusedRows(
            bad_rows, columns, lambda: self._make_columns(self._load(context), context)
        )
        if self.upserts:
            return LakeChangeWriter(context, self.rules, version.table_id, refused)
        files = IcebergDataFiles(self._address, version.table, context, refused)
        return LakeWriter(context, files, refused)

    def _load(self, context: spi.WriterContext) -> IcebergVersion:
        with self._open_table(context.sink_id) as table:
            return table.load()

    def _make_columns(self, version: IcebergVersion, context: spi.WriterContext) -> TableColumns:
        """Return the conversion of a writer's rows to rows of the table.

        Raises:
            ConfigError: The rows cannot go into the table.
        """
        from onceflow.sinks.iceberg.table_rules import make_columns

        table, rows = version.table, self.rules.select_table_columns(context.schema)
        return make_columns(str(self._address), table.schema(), table.spec(), rows)

    @override
    def committer(self, context: spi.CommitterContext) -> spi.GlobalCommitter:
        from onceflow.sinks.iceberg.table import IcebergTable

        return self.make_committer(IcebergTable(self._address, context.sink_id), context)

    @property
    def _address(self) -> TableAddress:
        return TableAddress(tuple(self.table), self.branch, self.catalog_name, self.catalog)

    @contextmanager
    def _open_table(self, sink_id: str) -> Generator[IcebergTable, None, None]:
        self._address.require_library()
        from onceflow.sinks.iceberg.table import IcebergTable

        table = IcebergTable(self._address, sink_id)
        try:
            yield table
        finally:
            table.close()
