"""The choice of the place where the decisions of a sink's batches are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from onceflow.clients.sql.session import SqlEndpoint
from onceflow.connectors.spark.batch.commits import SETTLE_TIMEOUT_S, BatchTarget
from onceflow.connectors.spark.batch.identity import NamedTarget, is_files, is_kafka
from onceflow.connectors.spark.batch.sink_group import SinkGroup
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.log.rules import NO_ATTEMPT
from onceflow.core.settings.pipeline_settings import Delivery
from onceflow.core.spi import Sink
from onceflow.core.spi.batch_decisions import BatchDecisions, BatchNotes
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.core.storage.filesystems.filesystem import CreatesAtomically
from onceflow.core.storage.filesystems.local import CHECKPOINT_STORAGE
from onceflow.core.storage.log.batch_log import LoggedBatchDecisions, NotedBatchDecisions
from onceflow.sinks.sql.batch_table import DecidedPart, SqlBatchDecisions
from onceflow.sinks.sql.sink import SqlSink


def resolve_keeper(named: NamedTarget) -> tuple[BatchTarget, BatchDecisions]:
    """Return the target and the keeper of its decisions.

    For a database, the keeper is the database itself. Otherwise it is a log in files. The log of a
    `write` to files is in the target directory. Kafka notes which batches of a `write` it has. For
    a group of sinks, the first sink decides.

    Raises:
        ConfigError: There is neither a database nor a directory, or the sink's delivery is not
            exactly_once.
    """
    target, sink = named.target, named.target.sink
    if isinstance(sink, SinkGroup):
        sink = next(iter(sink.parts.values()))
    if isinstance(sink, SqlSink):
        if sink.delivery != Delivery.EXACTLY_ONCE.value:
            raise ConfigError(
                f"{sink}: a Spark format always writes exactly once; leave delivery out"
            )
        parts = _parts_beside(sink, target)
        return target, SqlBatchDecisions(
            sink.settings,
            target.sink_id,
            target.owner,
            parts,
            reconnect_timeout_s=SETTLE_TIMEOUT_S,
        )
    beside = _files_of_target(named)
    if beside is not None:
        return target, LoggedBatchDecisions(
            beside, target.sink_id, target.claimant, _newest_in_target(target)
        )
    if named.directory is None:
        raise ConfigError(
            f"{type(sink).__name__} keeps the decisions of its batches in stagingLocation. Give"
            " this option: a directory or the URL of a bucket that driver and executors see"
        )
    files = files_of(named.directory)
    if is_kafka(target.sink):
        notes = _notes(target)
        if named.is_write and target.source:
            return target, NotedBatchDecisions(
                files, target.sink_id, target.claimant, source=target.source, notes=notes
            )
        return target, LoggedBatchDecisions(
            files, target.sink_id, target.claimant, lambda: notes.read().attempt
        )
    return target, LoggedBatchDecisions(
        files, target.sink_id, target.claimant, _newest_in_target(target)
    )


def _newest_in_target(target: BatchTarget) -> Callable[[], AttemptId] | None:
    """Return a function that reads the target's newest attempt; None if the sink has none."""
    sink, context = target.sink, target.committer_context(NO_ATTEMPT)
    # If the method is not overridden, the sink cannot answer, and would return None as without any
    # claim.
    if isinstance(sink, SinkGroup) or type(sink).target_record is Sink.target_record:
        return None

    def newest() -> AttemptId:
        record = sink.target_record(context)
        return NO_ATTEMPT if record is None else record.attempt

    return newest


def _notes(target: BatchTarget) -> BatchNotes:
    from onceflow.sinks.kafka.batch_group import KafkaBatchNotes
    from onceflow.sinks.kafka.sink import KafkaSink

    assert isinstance(target.sink, KafkaSink)
    return KafkaBatchNotes(target.sink.settings, target.committer_context(NO_ATTEMPT))


def _files_of_target(named: NamedTarget) -> CreatesAtomically | None:
    """Return the hidden directory of a target of files for decisions of writes, or None."""
    if not named.is_write or not is_files(named.target.sink):
        return None
    from onceflow.sinks.files.layout import HIDDEN
    from onceflow.sinks.files.sink import FileSink

    assert isinstance(named.target.sink, FileSink)
    location = named.target.sink.settings.location
    files = replace(location, root=f"{location.root}/{HIDDEN}").open(CHECKPOINT_STORAGE)
    return files if isinstance(files, CreatesAtomically) else None


def _parts_beside(keeper: SqlSink, target: BatchTarget) -> Mapping[str, DecidedPart]:
    """Return the sinks of `target` by sink id whose rows are in the keeper's database."""
    group = target.sink
    if not isinstance(group, SinkGroup):
        return {target.sink_id: DecidedPart(keeper.settings, target.staging, target.replaces)}
    ids = {group.part_id(target.sink_id, name): sink for name, sink in group.parts.items()}
    return {
        part_id: DecidedPart(sink.settings, group.staging(part_id))
        for part_id, sink in ids.items()
        if isinstance(sink, SqlSink) and _database(sink) == _database(keeper)
    }


def _database(sink: SqlSink) -> tuple[SqlEndpoint, str]:
    return sink.endpoint, sink.settings.ledger_schema


def open_decision_log(directory: str, sink_id: str) -> BatchDecisions:
    """Return the log of decisions in `directory`, which need not exist yet.

    Raises:
        ConfigError: The place cannot create files atomically.
    """
    return LoggedBatchDecisions(files_of(directory), sink_id)


def files_of(directory: str) -> CreatesAtomically:
    """Return the files in `directory`, which can hold decisions.

    Raises:
        ConfigError: The place cannot create files atomically.
    """
    location = FileLocation.parse(directory, publish="auto", options={})
    files = location.open(CHECKPOINT_STORAGE)
    if not isinstance(files, CreatesAtomically):
        raise ConfigError(
            f"{location} cannot ensure that only one of two writers creates a file. Give option"
            " stagingLocation: a directory or an s3:// or gs:// bucket"
        )
    return files
