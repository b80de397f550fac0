"""An Iceberg table for the common committer: a commit is one snapshot with its record.

    properties   onceflow.sink.<sink id>            the sink's record
                 onceflow.sink.<sink id>.snapshot   its last snapshot: id and sequence number
    summary      onceflow.log-id, .sink-id, .attempt, .checkpoint of each snapshot, and
                 .checkpoint-before, .attempts: whose transactions it has

Record and snapshot change in one commit. The catalog accepts it only while the branch is at the
snapshot that the commit has read. So an attempt claims the sink id by a snapshot without rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from pathlib import Path
from urllib.parse import urlparse

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchNamespaceError,
    NoSuchTableError,
    ValidationException,
)
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot, ancestors_of
from pyiceberg.table.update import AddSnapshotUpdate, AssertTableUUID, TableUpdate
from typing_extensions import override

from onceflow.core.errors import SinkError, TargetRefused
from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks.iceberg.catalogs import TableAddress
from onceflow.sinks.iceberg.data_files import delete_files, list_files
from onceflow.sinks.iceberg.row_changes import RewrittenFiles, rewrite_files
from onceflow.sinks.iceberg.snapshots import Snapshots, assign_spec, find_spec
from onceflow.sinks.iceberg.staged_files import StagedFiles, decode_files
from onceflow.sinks.iceberg.table_rules import (
    find_broken_requirement,
    find_dropped_column,
    is_dropped_column,
    refuse_format_version,
)
from onceflow.sinks.lake.data_files import DataFileNames, check_own_path, to_name
from onceflow.sinks.lake.table import (
    DELETES,
    PREFIX,
    CommitConflict,
    CommitUnknown,
    LakeTable,
    Requests,
    RowChanges,
    SinkRecord,
    TableVersion,
    describe_commit,
    describe_error,
    has_committed,
    library_errors,
    parse_record,
)


class IcebergTable(LakeTable):
    """The table at `address`, for one sink id."""

    def __init__(self, address: TableAddress, sink_id: str) -> None:
        """Connect to nothing yet."""
        super().__init__()
        self._address, self._sink_id = address, sink_id
        self._catalog: Catalog | None = None

    @property
    def catalog(self) -> Catalog:
        """The catalog, connected if needed.

        Raises:
            ConfigError: There is no such catalog.
            SinkError: The catalog cannot be reached now.
        """
        if self._catalog is None:
            self._catalog = self._address.open_catalog()
        return self._catalog

    def find_table(self) -> Table | None:
        """Return the table as a pyiceberg object, or None if there is none.

        Raises:
            SinkError: The catalog cannot be asked now.
        """
        with library_errors(f"{self._address} cannot be loaded"):
            try:
                return self.catalog.load_table(self._address.table)
            except (NoSuchTableError, NoSuchNamespaceError):
                return None
            except Exception:
                # The next call connects again and resolves secrets again, because a token may have
                # been replaced.
                self.close()
                raise

    @override
    def load(self) -> IcebergVersion:
        table = self.find_table()
        if table is None:
            raise SinkError(f"{self._address} is not in catalog {self._address.catalog_name!r}")
        return IcebergVersion(self._address, self._sink_id, table, self.requests)

    @override
    def list_paths(self, staged: pa.RecordBatch) -> Sequence[str]:
        return [
            file.file_path for staged_files in decode_files([staged]) for file in staged_files.files
        ]

    @override
    def list_files(self) -> Iterator[tuple[str, datetime]]:
        table = self.load().table
        yield from list_files(table.io, table.location_provider().data_path)

    @override
    def delete_files(self, paths: Sequence[str]) -> None:
        table = self.find_table()
        if table is not None:
            _check_own_paths(table, self._sink_id, paths)
            delete_files(table.io, paths)

    @override
    def close(self) -> None:
        super().close()
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None


@dataclass(frozen=True)
class IcebergVersion(TableVersion):
    """The table as one load returned it."""

    address: TableAddress
    sink_id: str
    table: Table
    requests: Requests = field(repr=False)
    _decoded: dict[int, tuple[Sequence[pa.RecordBatch], Sequence[StagedFiles]]] = field(
        default_factory=dict[int, tuple[Sequence[pa.RecordBatch], Sequence[StagedFiles]]],
        repr=False,
    )
    """The decoded files by the identity of the staged rows, which this cache keeps alive."""

    @property
    def record_name(self) -> str:
        """The table property that contains the record."""
        return f"{PREFIX}sink.{self.sink_id}"

    @property
    @override
    def record(self) -> SinkRecord | None:
        text = self.table.properties.get(self.record_name)
        return parse_record(text, f"{self.address}: property {self.record_name!r}")

    @property
    @override
    def damage(self) -> str:
        last = self.table.properties.get(self._snapshot_name)
        if not last:
            return ""
        snapshot_id, sequence_number = map(int, last.split())
        ancestors = list(ancestors_of(self._head, self.table.metadata))
        if any(ancestor.snapshot_id == snapshot_id for ancestor in ancestors):
            return ""
        if ancestors and self._has_expired(snapshot_id, sequence_number, ancestors):
            return ""
        head = f"is at snapshot {ancestors[0].snapshot_id}" if ancestors else "has no snapshot"
        return (
            f"{self.address}: snapshot {snapshot_id}, the last one of sink id {self.sink_id!r},"
            f" is not in the history of branch {self.address.branch!r}, which {head}: the table"
            " was rolled back or replaced, and rows that the job has committed are lost. Set the"
            f" branch back to snapshot {snapshot_id}. If the loss is intended, remove the table"
            f" property {self._snapshot_name!r}: the job then goes on without these rows"
        )

    @property
    @override
    def refusal(self) -> str:
        return refuse_format_version(str(self.address), self.table)

    @override
    def find_loss(self, staged: Sequence[pa.RecordBatch]) -> str:
        decoded = self._decode(staged)
        other = next(
            (
                staged_files.table_uuid
                for staged_files in decoded
                if staged_files.table_uuid != self.table_id
            ),
            "",
        )
        if other:
            return self.describe_replaced(other)
        missing = self._first_missing(
            [file.file_path for staged_files in decoded for file in staged_files.files]
        )
        return f"{self.address}: data file {missing} is gone" if missing else ""

    @override
    def append(
        self,
        staged: Sequence[pa.RecordBatch],
        record: SinkRecord,
        transactions: Sequence[TransactionId],
    ) -> int:
        commit = _Commit(self.table)
        with library_errors(f"{self.address}: no snapshot was written"):
            decoded = self._decode(staged)
            self._check_columns(decoded, staged, record, transactions)
            self._check_specs(decoded)
            summary = self._summarize(record, transactions)
            last = commit.append_files(decoded, summary, self.address.branch)
            self._set_record(commit, record, last)
        commit.send(str(self.address))
        return sum(len(staged_files.files) for staged_files in decoded)

    @override
    def replace_rows(
        self, changes: RowChanges, record: SinkRecord, transactions: Sequence[TransactionId]
    ) -> int:
        """Replace the data files that have rows of the changed keys, in one snapshot.

        After the commit was sent, no file is deleted: a catalog may report a commit as failed that
        it has made.
        """
        changes = self._leave_out_dropped(changes, record, transactions)
        branch = self.address.branch
        names = DataFileNames(self.sink_id, record.attempt, self._through + 1, subtask=0)
        with library_errors(f"{self.address}: changes cannot be written"):
            rewritten = rewrite_files(self.table, branch, changes, names)
        commit = _Commit(self.table)
        try:
            with library_errors(f"{self.address}: no snapshot was written"):
                summary = self._summarize(record, transactions)
                last = commit.replace_files(rewritten, summary, branch)
                self._set_record(commit, record, last)
        except SinkError:
            delete_files(self.table.io, [file.file_path for file in rewritten.added])
            raise
        commit.send(str(self.address))
        return len(rewritten.added)

    @property
    @override
    def table_id(self) -> str:
        return str(self.table.metadata.table_uuid)

    @override
    def describe_replaced(self, table_id: str) -> str:
        return (
            f"{self.address} has UUID {self.table_id}, but the rows were written for the table"
            f" with UUID {table_id}: that table was dropped, and another one created in its"
            " place"
        )

    @override
    def is_committed(self, transaction: TransactionId) -> bool:
        return any(
            snapshot.summary is not None
            and has_committed(snapshot.summary.additional_properties, self.sink_id, transaction)
            for snapshot in self._snapshots()
        )

    @override
    def refers_to(self, staged: pa.RecordBatch) -> bool:
        (decoded,) = decode_files([staged])
        paths = {file.file_path for file in decoded.files}
        if decoded.table_uuid != self.table_id:
            return False
        with library_errors(f"{self.address}: its manifests cannot be read"):
            later = [
                candidate
                for candidate in self._snapshots()
                if _read_number(candidate) > decoded.sequence_last
            ]
            manifests = {
                manifest.manifest_path: manifest
                for snapshot in later
                for manifest in snapshot.manifests(self.table.io)
                if manifest.sequence_number > decoded.sequence_last
            }
            return any(
                entry.data_file.file_path in paths
                for manifest in manifests.values()
                for entry in manifest.fetch_manifest_entry(self.table.io)
            )

    @override
    def find_unnamed(self, names: Collection[str]) -> Collection[str]:
        unnamed = set(names)
        with library_errors(f"{self.address}: its manifests cannot be read"):
            manifests = {
                manifest.manifest_path: manifest
                for snapshot in self._snapshots()
                for manifest in snapshot.manifests(self.table.io)
            }
            for manifest in manifests.values():
                for entry in manifest.fetch_manifest_entry(self.table.io):
                    unnamed.discard(to_name(entry.data_file.file_path))
        return unnamed

    def _check_columns(
        self,
        decoded: Sequence[StagedFiles],
        staged: Sequence[pa.RecordBatch],
        record: SinkRecord,
        transactions: Sequence[TransactionId],
    ) -> None:
        """Raise TargetRefused if columns were changed so that readers would lose values.

        A dropped column is allowed in files of an earlier attempt, because the start of this
        attempt has compared the columns of the rows with the table.
        """
        schema = self.table.schema()
        for staged_files in decoded:
            broken = find_broken_requirement(staged_files.schema, schema, staged_files.files)
            if broken:
                raise TargetRefused(
                    f"{self.address}: rows wait for their commit, and {broken}: make the column"
                    " optional, or drop it"
                )
        dropped = [find_dropped_column(staged_files.schema, schema) for staged_files in decoded]
        if not any(name for name, _ in dropped):
            return
        pairs = zip(staged, transactions, strict=True)
        current = [batch for batch, transaction in pairs if transaction.attempt >= record.attempt]
        running = [staged_files.schema for staged_files in decode_files(current)]
        for staged_files, (name, is_reused) in zip(decoded, dropped, strict=True):
            if is_reused:
                raise TargetRefused(
                    f"{self.address}: column {name!r} was dropped and created anew, but rows"
                    " that wait for their commit have values of the old column, which no reader"
                    " would find. Give the new column another name, and start the job without"
                    f" the column {name!r}: it then commits the waiting rows without these"
                    " values"
                )
            if name and staged_files.schema in running:
                raise self._refuse_dropped(name)

    def _check_specs(self, decoded: Sequence[StagedFiles]) -> None:
        """Raise TargetRefused if a partition spec of waiting files was removed from the table."""
        for files in decoded:
            if find_spec(self.table.metadata, files.spec) is None:
                terms = ", ".join(map(str, files.spec.fields))
                raise TargetRefused(
                    f"{self.address}: rows wait for their commit, and the partition spec that they"
                    f" were written with ({terms}) was removed from the table. Remove all partition"
                    " fields of the table, and set your partition spec again: the job then commits"
                    " the rows as a part without partitions"
                )

    def _leave_out_dropped(
        self, changes: RowChanges, record: SinkRecord, transactions: Sequence[TransactionId]
    ) -> RowChanges:
        """Return `changes` without columns that the table has dropped.

        The start of this attempt has compared the columns of the rows with the table. So only
        changes of earlier attempts may have such a column.

        Raises:
            TargetRefused: A column was dropped, and this attempt has changes.
        """
        names = [name for name in changes.rows.column_names if name not in (*changes.key, DELETES)]
        dropped = [name for name in names if is_dropped_column(name, self.table.metadata)]
        if dropped and any(transaction.attempt >= record.attempt for transaction in transactions):
            raise self._refuse_dropped(dropped[0])
        return RowChanges(changes.rows.drop_columns(dropped), changes.key)

    def _refuse_dropped(self, column: str) -> TargetRefused:
        return TargetRefused(
            f"{self.address}: column {column!r} was dropped while the job writes it, so readers"
            " would not find its values. Stop the job and start it without the column: it then"
            " commits the waiting rows without these values"
        )

    @property
    def _through(self) -> int:
        record = self.record
        return record.through if record else 0

    def _summarize(
        self, record: SinkRecord, transactions: Sequence[TransactionId]
    ) -> Mapping[str, str]:
        return describe_commit(self.sink_id, record, self._through, transactions)

    def _set_record(self, commit: _Commit, record: SinkRecord, last: Snapshot) -> None:
        commit.set_properties(
            {
                self.record_name: record.to_json(),
                self._snapshot_name: f"{last.snapshot_id} {last.sequence_number}",
            }
        )

    @property
    def _snapshot_name(self) -> str:
        return f"{self.record_name}.snapshot"

    def _decode(self, staged: Sequence[pa.RecordBatch]) -> Sequence[StagedFiles]:
        """Return the decoded files; decode only once for the check and the commit."""
        if id(staged) not in self._decoded:
            decoded = decode_files(staged)
            paths = [file.file_path for staged_files in decoded for file in staged_files.files]
            if all(staged_files.table_uuid == self.table_id for staged_files in decoded):
                _check_own_paths(self.table, self.sink_id, paths)
            self._decoded[id(staged)] = staged, decoded
        return self._decoded[id(staged)][1]

    def _has_expired(
        self, snapshot_id: int, sequence_number: int, ancestors: Sequence[Snapshot]
    ) -> bool:
        """Return True if the branch lacks the snapshot only because its history was cut.

        Expired snapshots are gone, unless a tag or another branch keeps them.
        """
        metadata = self.table.metadata
        if metadata.snapshot_by_id(snapshot_id) is None:
            return _read_number(ancestors[0]) > sequence_number
        is_kept = any(ref.snapshot_id == snapshot_id for ref in metadata.refs.values())
        return is_kept and _read_number(ancestors[-1]) > sequence_number

    @property
    def _head(self) -> Snapshot | None:
        return self.table.snapshot_by_name(self.address.branch)

    def _snapshots(self) -> Sequence[Snapshot]:
        return self.table.metadata.snapshots

    def _first_missing(self, paths: Sequence[str]) -> str:
        def exists(path: str) -> bool:
            return self.table.io.new_input(path).exists()

        with library_errors(f"{self.address}: the sink cannot check whether data files exist"):
            answers = zip(paths, self.requests.ask(exists, paths), strict=True)
            return next((path for path, there in answers if not there), "")


class _Commit(Transaction):
    """A transaction that is sent once: pyiceberg's own would append again after a conflict.

    It would also delete the manifests of a commit that the catalog reports as failed. If a proxy
    repeats requests, that reply may come for a commit that was made.
    """

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._updated: tuple[TableMetadata, tuple[TableUpdate, ...], TableMetadata] | None = None

    @property
    @override
    def table_metadata(self) -> TableMetadata:
        """The metadata with the updates so far, cached.

        The library copies all snapshots at each access, some fifteen times per commit. For a table
        with thousands of snapshots that takes a second.
        """
        metadata, updates = self._table.metadata, self._updates
        if not updates:
            return metadata
        known = self._updated
        if known is None or known[0] is not metadata or known[1] is not updates:
            known = self._updated = metadata, updates, super().table_metadata
        return known[2]

    def append_files(
        self, staged: Sequence[StagedFiles], summary: Mapping[str, str], branch: str
    ) -> Snapshot:
        """Add a snapshot with all files.

        If they have several partition specs, one snapshot for each.
        """
        metadata = self._table.metadata
        files = sorted(
            (
                (spec, file)
                for staged_files in staged
                for spec, file in assign_spec(metadata, staged_files)
            ),
            key=_read_spec,
        )
        groups = [(spec, [file for _, file in group]) for spec, group in groupby(files, _read_spec)]
        for spec_id, group in groups or [(metadata.default_spec_id, [])]:
            # The default spec decides the manifest's spec: use the files' spec, not the table's
            # current one.
            self._table.metadata = metadata.model_copy(update={"default_spec_id": spec_id})
            update = Snapshots(self, self._table.io, branch, summary)
            with update.append([staged_files.schema for staged_files in staged]) as append:
                for file in group:
                    append.append_data_file(file)
        self._table.metadata = metadata
        return self._find_added_snapshot()

    def replace_files(
        self, rewritten: RewrittenFiles, summary: Mapping[str, str], branch: str
    ) -> Snapshot:
        """Add a snapshot in which files replace other files."""
        if not rewritten.removed:
            metadata = self._table.metadata
            uuid, spec = str(metadata.table_uuid), metadata.spec()
            added = StagedFiles(uuid, spec, 0, rewritten.added, metadata.schema())
            return self.append_files([added], summary, branch)
        update = Snapshots(self, self._table.io, branch, summary)
        with update.overwrite() as overwrite:
            for file in rewritten.removed:
                overwrite.delete_data_file(file)
            for file in rewritten.added:
                overwrite.append_data_file(file)
        return self._find_added_snapshot()

    def _find_added_snapshot(self) -> Snapshot:
        """Return the last snapshot of the updates, without the copy that `table_metadata` makes."""
        return [
            update.snapshot for update in self._updates if isinstance(update, AddSnapshotUpdate)
        ][-1]

    def send(self, table: str) -> None:
        """Send the commit, once.

        Raises:
            CommitConflict: The table has changed since it was read.
            CommitUnknown: There was no reply, or an error that may follow a commit that was made.
        """
        uuid = AssertTableUUID(uuid=self._table.metadata.table_uuid)
        try:
            with warnings.catch_warnings():
                # Old metadata files that cannot be deleted after the commit do no harm.
                warnings.filterwarnings("ignore", message="Failed to delete old metadata")
                self._table._do_commit(  # pyright: ignore[reportPrivateUsage]
                    self._updates, (*self._requirements, uuid)
                )
        except (CommitFailedException, ValidationException) as error:
            raise CommitConflict(f"{table}: {describe_error(error)}") from error
        except Exception as error:
            raise CommitUnknown(
                f"{table}: it is unknown whether the snapshot was written: {describe_error(error)}"
            ) from error


def _check_own_paths(table: Table, sink_id: str, paths: Sequence[str]) -> None:
    """Raise SinkError unless each of `paths` is a file of the sink id in the table's location."""
    roots = [table.location_provider().data_path.rstrip("/"), table.location().rstrip("/")]
    # A user may change the table's location while a job runs. The files stay at the old location.
    former = [entry.metadata_file for entry in table.metadata.metadata_log]
    roots += [path.rpartition("/metadata/")[0] for path in former if "/metadata/" in path]
    for path in paths:
        root = next((candidate for candidate in roots if path.startswith(f"{candidate}/")), None)
        if root is None:
            raise SinkError(
                f"a staged description is damaged: {path!r} is not in the table's location"
                f" {roots[0]}"
            )
        url = urlparse(root)
        directory = Path(url.path) if url.scheme in ("", "file") else None
        check_own_path(path[len(root) + 1 :], sink_id, directory)


def _read_spec(pair: tuple[int, DataFile]) -> int:
    return pair[0]


def _read_number(snapshot: Snapshot) -> int:
    return snapshot.sequence_number or 0
