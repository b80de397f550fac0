"""A Delta table for the common committer: a commit is one version with its proof.

    txn             application id: the sink id; version: the last checkpoint that is committed
    configuration   onceflow.sink.<sink id>: the log that owns it, its attempts and their claims
    commit info     onceflow.sink-id, .log-id, .attempt, .checkpoint, .checkpoint-before, .attempts

A version is made directly after the version that was read, or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, cast

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import FileSelector, FileType
from typing_extensions import override

from onceflow.core.errors import ConfigError, SinkError, TargetRefused
from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks.delta.data_files import DescribedFiles, decode_files, delete_files
from onceflow.sinks.delta.layout import (
    cast_changes,
    check_replaceable,
    check_table,
    find_change_misfit,
    find_misfit,
    read_layout,
    to_arrow_schema,
)
from onceflow.sinks.delta.location import TableLocation
from onceflow.sinks.lake.data_files import to_name
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

_VERSIONS_READ = (1, 16, 256, None)
"""The numbers of history entries that are read until the last commit of the sink id is found.
Usually it is the newest."""


class DeltaLakeTable(LakeTable):
    """The table at `location`, for one sink id."""

    def __init__(self, location: TableLocation, sink_id: str) -> None:
        """Connect to nothing yet."""
        super().__init__()
        self._location, self._sink_id = location, sink_id

    @override
    def load(self) -> DeltaVersion:
        table = self._location.find_table()
        if table is None:
            raise SinkError(f"{self._location} does not exist")
        return DeltaVersion(self._location, self._sink_id, table, self.requests)

    @override
    def list_paths(self, staged: pa.RecordBatch) -> Sequence[str]:
        return [file.path for file in decode_files(staged, self._sink_id).files]

    @override
    def list_files(self) -> Iterator[tuple[str, datetime]]:
        """Yield the files of the table's own directory, where the sink also writes partitions."""
        with library_errors(f"{self._location}: its files cannot be listed"):
            files = self._location.open_files().get_file_info(FileSelector(""))
        for file in files:
            if file.type is FileType.File and file.mtime is not None:
                yield file.path, file.mtime

    @override
    def delete_files(self, paths: Sequence[str]) -> None:
        with library_errors(f"{self._location}: data files are not deleted"):
            delete_files(self._location.open_files(), paths)


@dataclass(frozen=True)
class DeltaVersion(TableVersion):
    """The table as one load returned it."""

    location: TableLocation
    sink_id: str
    table: DeltaTable
    requests: Requests = field(repr=False)

    @property
    @override
    def record(self) -> SinkRecord | None:
        text = self.table.metadata().configuration.get(self._record_name)
        record = parse_record(text, f"{self.location}: property {self._record_name!r}")
        return record and msgspec.structs.replace(record, through=self._through)

    @property
    @override
    def damage(self) -> str:
        """The harm done by a RESTORE, which removes rows but keeps `txn`.

        Empty if there is none.
        """
        restored = self._find_harmful_restore() if self._through else None
        if restored is None:
            return ""
        return (
            f"{self.location}: version {restored} restored an older version after sink id"
            f" {self.sink_id!r} had committed checkpoint {self._through}, so committed rows of"
            f" the job may be gone. Restore version {restored - 1}, the version before the"
            " restore"
        )

    @property
    @override
    def refusal(self) -> str:
        """The rules added to the table since the start. Waiting rows were not checked for them."""
        try:
            check_table(self.location, self.table)
        except ConfigError as error:
            return (
                f"{error}. Rows that were written without such rules wait for their commit."
                " First remove the rules from the table, start the job, and stop it"
            )
        return ""

    def _find_harmful_restore(self) -> int | None:
        """Return the RESTORE that removed the sink id's last commit, or None if none did."""
        for limit in _VERSIONS_READ:
            with library_errors(f"{self.location}: its history cannot be read"):
                history = self.table.history(limit)
            own = next((c for c in history if c.get(f"{PREFIX}sink-id") == self.sink_id), None)
            if own is not None or limit is None or len(history) < limit:
                own_version = own["version"] if own else history[-1]["version"] - 1
                return _find_restore_beyond(own_version, history)
        return None

    @override
    def find_loss(self, staged: Sequence[pa.RecordBatch]) -> str:
        decoded = [decode_files(batch, self.sink_id) for batch in staged]
        other = next(
            (
                staged_files.table_id
                for staged_files in decoded
                if staged_files.table_id != self.table_id
            ),
            "",
        )
        if other:
            return self.describe_replaced(other)
        paths = [file.path for staged_files in decoded for file in staged_files.files]
        with library_errors(f"{self.location}: the sink cannot check whether data files exist"):
            missing = self._first_missing(paths)
        return f"{self.location}: data file {missing} is gone" if missing else ""

    def _first_missing(self, paths: Sequence[str]) -> str:
        directory = self.location.directory
        if directory is not None:
            return next((path for path in paths if not (directory / path).exists()), "")
        files = self.location.open_files()

        def is_missing(path: str) -> bool:
            return files.get_file_info([path])[0].type is FileType.NotFound

        answers = zip(paths, self.requests.ask(is_missing, paths), strict=True)
        return next((path for path, missing in answers if missing), "")

    @override
    def append(
        self,
        staged: Sequence[pa.RecordBatch],
        record: SinkRecord,
        transactions: Sequence[TransactionId],
    ) -> int:
        info = self._describe_commit(record, transactions)
        decoded = [decode_files(batch, self.sink_id) for batch in staged]
        self._check_layout(decoded)
        with self._commit_errors():
            if record.through == self._through:
                self._claim(record, info)
                return 0
            return self._append_files(decoded, record, info)

    @override
    def replace_rows(
        self, changes: RowChanges, record: SinkRecord, transactions: Sequence[TransactionId]
    ) -> int:
        """Apply the changes by a merge, with `txn` in the same version.

        A merge that finds nothing to change makes no version and leaves no proof. Then a separate
        version stores the proof.
        """
        check_replaceable(self.location, self.table)
        misfit = find_change_misfit(changes.rows, self.table)
        if misfit:
            raise TargetRefused(self._describe_misfit(misfit))
        with library_errors(f"{self.location}: changes cannot be written"):
            rows = cast_changes(changes.rows, self.table)
        changes = replace(changes, rows=rows)
        info, before = self._describe_commit(record, transactions), self.table.version()
        with self._commit_errors():
            metrics = self._merge(changes, record, info)
            if self.table.version() == before:
                return self._append_files((), record, info)
            return int(metrics["num_target_files_added"])

    @property
    @override
    def table_id(self) -> str:
        return str(self.table.metadata().id)

    @override
    def describe_replaced(self, table_id: str) -> str:
        return (
            f"{self.location} has id {self.table_id}, but the rows were written for the table"
            f" with id {table_id}: that table was deleted, and another one created in its place"
        )

    @override
    def is_committed(self, transaction: TransactionId) -> bool:
        with library_errors(f"{self.location}: its history cannot be read"):
            return any(
                has_committed(commit, self.sink_id, transaction) for commit in self.table.history()
            )

    @override
    def refers_to(self, staged: pa.RecordBatch) -> bool:
        decoded = decode_files(staged, self.sink_id)
        if decoded.table_id != self.table_id:
            return False
        paths = {file.path for file in decoded.files}
        with library_errors(f"{self.location}: its files cannot be listed"):
            return any(uri.rpartition("/")[2] in paths for uri in self.table.file_uris())

    @override
    def find_unnamed(self, names: Collection[str]) -> Collection[str]:
        """Return the files that a vacuum with the table's own retention would delete."""
        with library_errors(f"{self.location}: its files cannot be listed"):
            unneeded = self.table.vacuum(dry_run=True, full=True)
        return {to_name(path) for path in unneeded} & set(names)

    def _check_layout(self, staged: Sequence[DescribedFiles]) -> None:
        """Raise TargetRefused if this version of the table would lose values of `staged`."""
        layout = read_layout(self.table)
        for description in staged:
            statistics = [file.statistics for file in description.files]
            misfit = find_misfit(description.layout, layout, statistics)
            if misfit:
                raise TargetRefused(self._describe_misfit(misfit))

    def _describe_misfit(self, misfit: str) -> str:
        return (
            f"{self.location} was overwritten with another schema while rows wait for their commit:"
            f" {misfit}. Restore the version before that, or overwrite the table with its former"
            " columns and partitions; the rows are then committed"
        )

    def _describe_commit(
        self, record: SinkRecord, transactions: Sequence[TransactionId]
    ) -> dict[str, Any]:
        return dict(describe_commit(self.sink_id, record, self._through, transactions))

    @contextmanager
    def _commit_errors(self) -> Generator[None, None, None]:
        try:
            yield
        except CommitFailedError as error:
            raise CommitConflict(f"{self.location}: {describe_error(error)}") from error
        except Exception as error:
            raise CommitUnknown(
                f"{self.location}: it is unknown whether the version was written:"
                f" {describe_error(error)}"
            ) from error

    def _merge(self, changes: RowChanges, record: SinkRecord, info: dict[str, Any]) -> Any:
        equal = " AND ".join(f't."{name}" = s."{name}"' for name in changes.key)
        deletes, puts = f"s.{DELETES}", f"NOT s.{DELETES}"
        merger = self.table.merge(
            cast("Any", self._complete(changes.rows)),
            equal,
            source_alias="s",
            target_alias="t",
            commit_properties=self._commit_properties(record, info),
        )
        merger.when_matched_delete(predicate=deletes)
        merger.when_matched_update_all(predicate=puts, except_cols=[DELETES])
        merger.when_not_matched_insert_all(predicate=puts, except_cols=[DELETES])
        return merger.execute()

    def _complete(self, rows: pa.Table) -> pa.Table:
        """Return `rows` with nulls in columns that the table got since the rows were staged.

        Otherwise a merge would keep the old values of the replaced rows in these columns.
        """
        for column in to_arrow_schema(self.table):
            if column.name not in rows.column_names:
                rows = rows.append_column(column, pa.nulls(rows.num_rows, column.type))
        return rows

    def _commit_properties(self, record: SinkRecord, info: dict[str, Any]) -> CommitProperties:
        return CommitProperties(
            custom_metadata=info,
            max_commit_retries=0,
            app_transactions=[Transaction(self.sink_id, record.through)],
        )

    def _claim(self, record: SinkRecord, info: dict[str, Any]) -> None:
        self.table.alter.set_table_properties(
            {self._record_name: record.to_json()},
            raise_if_not_exists=False,
            commit_properties=CommitProperties(custom_metadata=info, max_commit_retries=0),
        )

    def _append_files(
        self, staged: Sequence[DescribedFiles], record: SinkRecord, info: dict[str, Any]
    ) -> int:
        now_ms = int(time.time() * 1000)
        files = [file for staged_files in staged for file in staged_files.files]
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size_bytes, file.partition, now_ms, True, file.statistics)
            for file in files
        ]
        self.table.create_write_transaction(
            actions,
            "append",
            self.table.schema(),
            partition_by=self.table.metadata().partition_columns,
            commit_properties=self._commit_properties(record, info),
        )
        return len(files)

    @cached_property
    def _through(self) -> int:
        return self.table.transaction_version(self.sink_id) or 0

    @property
    def _record_name(self) -> str:
        return f"{PREFIX}sink.{self.sink_id}"


def _find_restore_beyond(version: int, history: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the first RESTORE after `version`; None if the newest state comes from `version`.

    `history` has the newest commit first. It does not contain the version of a RESTORE by time.
    """
    restores = [
        commit
        for commit in history
        if commit["version"] > version and commit.get("operation") == "RESTORE"
    ]
    origin = history[0]["version"]
    for restore in restores:
        if restore["version"] <= origin:
            origin = int(restore.get("operationParameters", {}).get("version") or -1)
    return None if origin >= version else int(restores[-1]["version"])
