"""The records of a query's targets and of its first sink, written before a decision.

    <checkpoint>/onceflow/targets.json   {"sink_id": …, "targets": {name of the sink: its table}}

With another target, earlier rows would be in one target and later rows in the other. With another
sink id, the earlier decisions would not be found. A database or a directory is recognized by its
claims, because it may have moved with them to another address. A Kafka cluster is recognized by its
id.

The record of a query's first sink, whose database keeps the decisions of all sinks.

With another sink first, the decisions would not be found. A repeated batch would be written again,
and decided transactions would be rolled back.

The file is <checkpoint>/onceflow/first_sink. It has the sink's name, and is written before the
first decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from onceflow.connectors.spark.batch.commits import BatchTarget, TaskReport
from onceflow.connectors.spark.batch.identity import locate_target
from onceflow.connectors.spark.batch.sink_group import SinkGroup
from onceflow.core.decoding import json_decoder
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.log.rules import NO_ATTEMPT
from onceflow.core.spi import Sink
from onceflow.core.spi.batch_decisions import BatchDecisions
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.core.storage.filesystems.local import CHECKPOINT_STORAGE

_FIRST_SINK_FILE = "first_sink"


@dataclass(frozen=True, slots=True)
class FirstSink:
    """The first sink in the checkpoint and in the program. Any process of the driver may use it."""

    directory: str
    name: str

    def require(self, decisions: BatchDecisions) -> None:
        """Raise ConfigError unless the first sink is the same as before, in the same location.

        `decisions` are those that would be used. Changes nothing.

        Raises:
            ConfigError: Another sink is first, or its database has no decision.
            SinkError, StorageError: The target or the checkpoint cannot be read now.
        """
        noted = self._record_location.open(CHECKPOINT_STORAGE).read(_FIRST_SINK_FILE)
        if noted is None:
            return
        first = noted.decode()
        if first != self.name:
            raise ConfigError(
                f"foreach_batch names sink {self.name!r} first, but sink {first!r} keeps the"
                f" decisions of this query. Name {first!r} first, with the same sink as before."
                f" With another one batches would be written twice ({self._where})"
            )
        written, reason = "no decisions", ""
        try:
            if decisions.read_claim().attempt > 0:
                return
        except ConfigError as error:
            written, reason = "other decisions", f" ({error})"
        raise ConfigError(
            f"the first sink of this query, {first!r}, keeps the query's decisions, but its"
            f" database has {written}{reason}: the sink now leads to another database, or"
            " onceflow's own tables (onceflow_sinks, onceflow_batches) were dropped. Name the"
            " former database. If its decisions are lost, start the query with a new checkpoint"
            f" location, from the offsets after the last written row ({self._where})"
        )

    def note(self) -> None:
        """Write the first sink to the checkpoint, before any batch is decided. Idempotent.

        Raises:
            StorageError: The checkpoint cannot be written.
        """
        files = self._record_location.open(CHECKPOINT_STORAGE)
        # An existing name stays: earlier decisions were stored under it.
        if files.read(_FIRST_SINK_FILE) is None:
            files.make_directory("")
            files.write(_FIRST_SINK_FILE, [self.name.encode()])

    @property
    def _record_location(self) -> FileLocation:
        return FileLocation.parse(self.directory, publish="auto", options={})

    @property
    def _where(self) -> str:
        return f"noted in {self._record_location}/{_FIRST_SINK_FILE}"


_FILE = "targets.json"
_TWO_TARGETS = (
    "the earlier rows would be in one target and the later rows in another. Nothing was written"
)
_NEW_QUERY = (
    "To write all rows into the new target, start a new query, with a new checkpointLocation and a"
    " source that begins at its first row (startingOffsets=earliest, firstCopy=all)"
)


class _Note(msgspec.Struct, frozen=True):
    sink_id: str
    targets: Mapping[str, str]


@dataclass(slots=True)
class NotedSinks:
    """The record of a query's targets in its checkpoint. Any process of the driver may use it."""

    checkpoint: str
    target: BatchTarget
    _is_checked: bool = field(default=False, init=False)
    _is_noted: bool = field(default=False, init=False)

    def require(self) -> None:
        """Raise ConfigError unless each sink of the query writes to the same target as before.

        A sink that has not decided anything yet may write anywhere. Changes nothing.

        Raises:
            ConfigError: A sink writes to another target. The message says how to continue.
            SinkError, StorageError: The target or the checkpoint cannot be read now.
        """
        if self._is_checked:
            return
        noted = self._read()
        if noted.sink_id != self.target.sink_id:
            raise ConfigError(
                f"this query has written under sink id {noted.sink_id!r}, and now it would write"
                f" under {self.target.sink_id!r}, which does not know its decisions. If its"
                f" checkpoint was moved, give it option sinkId={noted.sink_id!r} (foreach_batch:"
                " sink_id)"
            )
        for sink_id, (name, sink) in self._sinks().items():
            former = noted.targets.get(name)
            if former is None:
                continue
            target = _describe_target(sink)
            if former != target:
                raise ConfigError(
                    f"this query has written to {former}, and now it would write to {target}:"
                    f" {_TWO_TARGETS}. To continue with {former}, name it as before. To continue"
                    f" with {target}, run the query with {former} until its last batch is"
                    f" written, then delete {self._location}/{_FILE}. {_NEW_QUERY}"
                )
            if not self._is_known(sink, sink_id):
                raise ConfigError(
                    f"this query has written to another target, because {sink} has no record of"
                    f" it: {_TWO_TARGETS}. Give the former server or directory; a copy of it must"
                    f" also contain onceflow's own tables or files. {_NEW_QUERY}"
                )
        self._is_checked = True

    def note(self, reports: Sequence[TaskReport]) -> None:
        """Write the targets to the checkpoint before the batch of `reports` is decided.

        A batch without rows is not decided, so the choice of a target remains open.

        Raises:
            SinkError, StorageError: The target does not answer, or the checkpoint cannot be
                written.
        """
        decides = self.target.replaces or any(report.committables for report in reports)
        if self._is_noted or not decides:
            return
        noted = self._read().targets
        added = {
            name: _describe_target(sink)
            for name, sink in self._sinks().values()
            if name not in noted
        }
        if added:
            files = self._location.open(CHECKPOINT_STORAGE)
            files.make_directory("")
            note = _Note(self.target.sink_id, {**noted, **added})
            files.write(_FILE, [msgspec.json.encode(note)])
        self._is_noted = True

    def _read(self) -> _Note:
        noted = self._location.open(CHECKPOINT_STORAGE).read(_FILE)
        return (
            _Note(self.target.sink_id, {}) if noted is None else json_decoder(_Note).decode(noted)
        )

    def _sinks(self) -> Mapping[str, tuple[str, Sink]]:
        """Return the name and the sink by sink id. A format has one sink, without a name."""
        sink, sink_id = self.target.sink, self.target.sink_id
        if not isinstance(sink, SinkGroup):
            return {sink_id: ("", sink)}
        names = sink.names(sink_id)
        return {part_id: (name, sink.parts[name]) for part_id, name in names.items()}

    def _is_known(self, sink: Sink, sink_id: str) -> bool:
        """Return True if the target has a claim of `sink_id`, or cannot tell."""
        context = replace(self.target.committer_context(NO_ATTEMPT), uid=sink_id, sink_id=sink_id)
        record = sink.target_record(context)
        return record is None or record.attempt > NO_ATTEMPT

    @property
    def _location(self) -> FileLocation:
        return FileLocation.parse(f"{self.checkpoint}/onceflow", publish="auto", options={})


def _describe_target(sink: Sink) -> str:
    """Return a text that identifies the sink's target within its server, or the sink's type.

    Kafka forgets the claims of a query that is stopped for long, so the text has the cluster's id.
    """
    location = locate_target(sink)
    cluster = f" of cluster {location.find_cluster()}" if location.find_cluster else ""
    return f"{location.kind} {location.name}{cluster}" if location.kind else type(sink).__name__
