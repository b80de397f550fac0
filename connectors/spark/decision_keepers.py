"""Chooses where the decisions of a sink's batches are kept."""

from __future__ import annotations

from collections.abc import Mapping

from onceflow.connectors.spark.batch_commits import BatchTarget
from onceflow.connectors.spark.batch_identity import NamedTarget
from onceflow.connectors.spark.sink_group import SinkGroup
from onceflow.core.batch_decisions import BatchDecisions
from onceflow.core.config import Delivery
from onceflow.core.errors import ConfigError
from onceflow.core.storage.batch_decisions import LoggedBatchDecisions
from onceflow.core.storage.file_location import FileLocation
from onceflow.core.storage.filesystem import CreatesAtomically
from onceflow.core.storage.local import CHECKPOINT_STORAGE
from onceflow.sinks.sql.batch_decisions import DecidedPart, SqlBatchDecisions
from onceflow.sinks.sql.session import Endpoint
from onceflow.sinks.sql.sink import SqlSink


def kept_target(named: NamedTarget) -> tuple[BatchTarget, BatchDecisions]:
    """Return the target and its keeper: its own database where it is one, else a log in files.

    Of a group of sinks the first one's is asked.

    Raises:
        ConfigError: There is neither, or the sink is told to write at least once.
    """
    target, sink = named.target, named.target.sink
    if isinstance(sink, SinkGroup):
        sink = next(iter(sink.parts.values()))
    if isinstance(sink, SqlSink):
        if sink.delivery != Delivery.EXACTLY_ONCE.value:
            raise ConfigError(f"{sink}: as a format of Spark a sink is always exactly_once")
        parts = _parts_beside(sink, target)
        return target, SqlBatchDecisions(sink.settings, target.sink_id, target.owner, parts)
    if named.directory is None:
        raise ConfigError(
            f"{type(sink).__name__} has no tables in which decisions could stand: give option"
            " stagingLocation, a directory or bucket that driver and executors see"
        )
    return target, logged_decisions(named.directory, target.sink_id, target.claimant)


def _parts_beside(keeper: SqlSink, target: BatchTarget) -> Mapping[str, DecidedPart]:
    """Return the sinks of `target`, by sink id, whose rows are in the keeper's database."""
    group = target.sink
    if not isinstance(group, SinkGroup):
        return {target.sink_id: DecidedPart(keeper.settings, target.staging, target.replaces)}
    ids = {group.part_id(target.sink_id, name): sink for name, sink in group.parts.items()}
    return {
        part_id: DecidedPart(sink.settings, group.staging(part_id))
        for part_id, sink in ids.items()
        if isinstance(sink, SqlSink) and _database(sink) == _database(keeper)
    }


def _database(sink: SqlSink) -> tuple[Endpoint, str]:
    return sink.endpoint, sink.settings.ledger_schema


def logged_decisions(directory: str, sink_id: str, claimant: str = "") -> BatchDecisions:
    """Return the log of decisions in `directory`, which need not be there yet.

    Raises:
        ConfigError: It is no place in which one of two creates a file.
    """
    place = FileLocation.parse(directory, publish="auto", options={})
    files = place.open(CHECKPOINT_STORAGE)
    if not isinstance(files, CreatesAtomically):
        raise ConfigError(
            f"{place}: of two writers that create one file there at once, both may believe to have"
            " done it; give option stagingLocation, a directory or an s3:// or gs:// bucket"
        )
    return LoggedBatchDecisions(files, sink_id, claimant)
