"""The file sink that users configure, and its committer.

The committer publishes, deletes and lists staged files, in any process, by the transaction's name
alone.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Literal

import pyarrow as pa
from typing_extensions import override

from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.log.target_records import TargetRecord, to_record
from onceflow.core.spi import Committer, CommitterContext, Sink, SinkWriter, WriterContext, options
from onceflow.core.spi.bad_rows import waits_for_person
from onceflow.core.storage.filesystems.file_location import FileLocation, Publish
from onceflow.core.storage.filesystems.filesystem import StreamedFiles
from onceflow.sinks.base.checks import check_sink_id, require_any_column
from onceflow.sinks.files.formats import Compression, file_format
from onceflow.sinks.files.layout import SinkPaths, claim, read_claim
from onceflow.sinks.files.partitions import Partitions
from onceflow.sinks.files.publication import (
    FAILURES,
    PublicationBegun,
    open_files,
    publication,
    sink_errors,
)
from onceflow.sinks.files.writer import FileSettings, FileWriter

_logger = logging.getLogger("onceflow.sinks.files")


class FileCommitter(Committer):
    """A committer that needs only names of transactions. Any process may call it repeatedly."""

    def __init__(self, settings: FileSettings, context: CommitterContext) -> None:
        """Connect to nothing yet."""
        self._sink_id = context.sink_id
        self._paths = SinkPaths(context.sink_id)
        self._fs = open_files(settings.location)
        self._publication = publication(self._fs, self._paths)
        self._pruned_before = CheckpointId(0)

    @override
    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        """Publish the files of the transaction. Return the outcome.

        A publication that another process or a crash left unfinished is continued. `Unknown`: some
        files of the transaction may be visible, and others not yet.
        """
        try:
            return self._publication.commit(committable.transaction)
        except PublicationBegun as error:
            return committables.Unknown(str(error))
        except FAILURES as error:
            return committables.RetryLater(str(error), until_fixed=waits_for_person(error))

    @override
    def abort(self, committable: committables.Committable) -> committables.AbortOutcome:
        """Delete the staged files of the transaction. Return the outcome.

        If its publication has begun, complete the publication and return that it is committed.
        """
        try:
            return self._publication.abort(committable.transaction)
        except PublicationBegun as error:
            return committables.Unknown(str(error))
        except FAILURES as error:
            return committables.RetryLater(str(error))

    @override
    def in_doubt(self) -> Sequence[committables.Committable]:
        """Return the transactions that are staged under exactly this sink id.

        Raises:
            SinkError: The directory cannot be listed now.
        """
        try:
            in_doubt = self._publication.in_doubt()
        except FAILURES as error:
            raise SinkError(
                f"sink {self._sink_id}: cannot list its transactions in doubt: {error}"
            ) from error
        return tuple(committables.Committable(transaction) for transaction in in_doubt)

    @override
    def find_prepare_time(self, committable: committables.Committable) -> datetime | None:
        with sink_errors():
            return self._publication.find_stage_time(committable.transaction)

    @override
    def prune(self, before: CheckpointId) -> None:
        """Delete the proofs of checkpoints before `before`, and write a mark that says so.

        A failure is only logged: proofs do no harm, and the next call comes soon.
        """
        if before <= self._pruned_before:
            return
        try:
            if self._prune(before):
                self._pruned_before = before
        except FAILURES as error:
            _logger.warning(
                "sink %s: proofs below checkpoint %s could not be deleted: %s",
                self._sink_id,
                before,
                error,
            )

    @override
    def close(self) -> None:
        """Do nothing, because no connection stays open after a call."""

    def _prune(self, before: CheckpointId) -> bool:
        """Delete old proofs; return True if none is left."""
        # Write the mark first: a reader that misses a proof must find the mark.
        self._fs.create_if_absent(self._paths.name_pruned_mark(before), b"pruned")
        old = [proof for proof in self._publication.list_proven() if proof.checkpoint < before]
        forgotten = [self._publication.forget(transaction) for transaction in old]
        for mark in self._fs.list(self._paths.pruned):
            if mark.isdigit() and int(mark) < before:
                self._fs.delete(f"{self._paths.pruned}/{mark}")
        return all(forgotten)


@options.document_options
@check_fields
@dataclass(frozen=True, kw_only=True, repr=False)
class FileSink(Sink):
    """A sink that writes rows to files in a directory or a bucket.

    Each row is in exactly one published file, through any crash. The sink writes rows to hidden
    files, and makes these durable at each barrier. After the decision it publishes each file in one
    step, by giving it its public name. The files of a checkpoint are published one after the other.

    All other files of onceflow are in `_onceflow` below the url. Readers of directories ignore that
    name. You may move or delete published files; on object stores only files that
    `list_committed_files` lists.

    The pickled sink contains its storage options. Its `repr` does not.

    Raises:
        ConfigError: A setting is invalid. `open` raises the errors that depend on the target.
    """

    instead_of_replacing: ClassVar[str] = "Write to a new directory, and let readers go there"
    url: str = field(
        kw_only=False,
        metadata=options.option(
            "The directory: a path or `file://…`, seen by driver and executors alike; or `s3://…`,"
            " `gs://…`, `abfs://…`, `hdfs://…` and whatever else fsspec has a package for",
            spark="path",
            secret=True,
        ),
    )
    format: Literal["parquet", "json"] = field(
        default="parquet",
        metadata=options.option(
            "`parquet`, or `json`: one object a line",
            options.choice("parquet", "json"),
            spark="fileFormat",
        ),
    )
    compression: Compression | None = field(
        default=None,
        metadata=options.option(
            "Parquet: `zstd` (the default), `snappy`, `gzip`, `lz4` or `none`. JSON: `none` (the"
            " default) or `gzip`",
            options.choice("zstd", "snappy", "gzip", "lz4", "none"),
            spark="compression",
        ),
    )
    partition_by: tuple[str, ...] = field(
        default=(),
        metadata=options.option(
            "Columns that name directories, as Hive and Spark do, instead of being in the files",
            options.NAMES,
            spark="partitionBy",
        ),
    )
    max_rows_per_file: int | None = field(
        default=None,
        metadata=options.option(
            "Maximum number of rows in a file", options.COUNT, spark="maxRecordsPerFile"
        ),
    )
    roll_bytes: int = field(
        default=256 * 1024 * 1024,
        metadata=options.option(
            "Size in bytes at which a file is closed and the next one begins. A file may be larger"
            " by one row group. A checkpoint closes all files anyway",
            options.COUNT,
            spark="rollBytes",
        ),
    )
    max_open_files: int = field(
        default=256,
        metadata=options.option(
            "How many files one subtask keeps open, one for each partition. With more partitions,"
            " files get smaller",
            options.COUNT,
            spark="maxOpenFiles",
        ),
    )
    publish: Publish = field(
        default="auto",
        metadata=options.option(
            "How a file becomes visible: `rename` for storage that renames in one step, `copy` for"
            " storage where a new file appears whole or not at all. `auto` chooses by the URL's"
            " protocol",
            options.choice("auto", "rename", "copy"),
            spark="publish",
        ),
    )
    storage_options: Mapping[str, Any] = field(
        default_factory=dict[str, Any],
        metadata=options.option(
            "What fsspec's file system is made with: credentials, endpoint. A text may refer to a"
            " secret: `${env:NAME}` or `${file:/path}`, followed where it connects",
            options.JSON_VALUE,
            spark="storage.*",
        ),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "partition_by", tuple(self.partition_by))
        for name in ("max_rows_per_file", "roll_bytes", "max_open_files"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        location = self.settings.location
        # Make the path absolute now, because executors may have another working directory.
        object.__setattr__(self, "url", location.url)

    @override
    def __repr__(self) -> str:
        return (
            f"FileSink({str(self.settings.location)!r}, format={self.format!r}, "
            f"partition_by={self.partition_by!r})"
        )

    @override
    def validate(self, context: CommitterContext, schema: pa.Schema) -> None:
        """Raise ConfigError unless files can hold such rows. Does not access the file system.

        Raises:
            ConfigError: They cannot: settings, sink id, columns or types.
        """
        check_sink_id(context.sink_id)
        _require_rows(self.settings, schema)

    @override
    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        """Prepare the target for rows of `schema`: create the directory, fence the sink id.

        Also deletes files of older attempts' writers that no manifest names. A crash in this call
        leaves at most the sink id claimed, which the next attempt claims in turn.

        Raises:
            ConfigError: The rows cannot be written (settings, rights, missing bucket, columns), or
                another job has the sink id.
            Fenced: This attempt or a newer one has claimed the sink id.
            SinkError: The target cannot be reached now.
        """
        self.validate(context, schema)
        settings = self.settings
        fs, paths = open_files(settings.location), SinkPaths(context.sink_id)
        with sink_errors():
            # Probe before the claim: a directory that cannot be written must not fence the running
            # attempt.
            _probe(fs, paths)
            claim(fs, paths, context)
            _sweep(fs, paths, context)

    @override
    def target_record(self, context: CommitterContext) -> TargetRecord:
        """Return the record of the proofs below the url."""
        fs, paths = open_files(self.settings.location), SinkPaths(context.sink_id)
        with sink_errors():
            attempt = read_claim(fs, paths, context)
            return to_record(context.sink_id, attempt, publication(fs, paths).list_proven())

    @override
    def writer(self, context: WriterContext) -> SinkWriter:
        return FileWriter(self.settings, context)

    @override
    def committer(self, context: CommitterContext) -> Committer:
        return FileCommitter(self.settings, context)

    @property
    def settings(self) -> FileSettings:
        """The resolved settings.

        They contain the storage options, and their repr does not show them.
        """
        return FileSettings(
            location=FileLocation.parse(
                self.url, publish=self.publish, options=self.storage_options
            ),
            form=file_format(self.format, self.compression),
            partition_by=self.partition_by,
            max_rows_per_file=self.max_rows_per_file,
            roll_bytes=self.roll_bytes,
            max_open_files=self.max_open_files,
        )


def _require_rows(settings: FileSettings, schema: pa.Schema) -> None:
    doubled = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if doubled:
        raise ConfigError(f"the rows have several columns called {', '.join(doubled)}; rename them")
    require_any_column(schema)
    columns = Partitions(settings.partition_by, schema).file_columns
    settings.form.require(pa.schema([schema.field(name) for name in columns]))


def _probe(fs: StreamedFiles, paths: SinkPaths) -> None:
    """Write, list, read and delete a file, so that a missing right is found before any commit."""
    path = f"{paths.directory}/probe/{uuid.uuid4().hex}"
    fs.write(path, (b"probe",))
    listed = fs.list(f"{paths.directory}/probe")
    read = fs.read(path)
    fs.delete(path)
    if path.rpartition("/")[2] not in listed or read != b"probe":
        raise ConfigError(
            f"{fs.location(path)} was written, but is not found: the file system must show"
            " written files at once"
        )


def _sweep(fs: StreamedFiles, paths: SinkPaths, context: CommitterContext) -> None:
    """Delete files of killed writers of older attempts that no manifest refers to.

    A fenced attempt may still be writing. Its transactions are never decided, so its files may be
    deleted.
    """
    # Files of this attempt and of newer ones are kept: their writers may be running.
    names = [
        name
        for name in fs.list(paths.open)
        if (attempt := SinkPaths.attempt_of(name)) is not None and attempt < context.attempt
    ]
    litter = [
        f"{directory}/{unfinished.name}"
        for directory in (paths.directory, paths.staged, paths.committed, paths.attempts)
        for unfinished in fs.list_unfinished(directory)
    ]
    if names:
        needed = publication(fs, paths).files_in_doubt()
        litter += [path for name in names if (path := f"{paths.open}/{name}") not in needed]
    if litter:
        _logger.info("sink %s: deleting %d files of killed writers", context.sink_id, len(litter))
        fs.for_each(fs.delete, litter)
