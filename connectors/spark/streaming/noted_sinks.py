"""Where a query writes, noted in its checkpoint before a decision.

    <checkpoint>/onceflow/targets.json   {"sink_id": …, "targets": {name of the sink: its table}}

With another target the rows so far would be in one, and all later ones in the other. With another
sink id nobody would know what is decided. A database is recognized by the claims that it remembers,
for it may have moved with them to another address. Kafka clusters and directories need no note: at
its start a query commits its last decision once more, which another one refuses by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from onceflow.connectors.spark.batch.commits import BatchTarget
from onceflow.connectors.spark.batch.identity import is_kafka
from onceflow.connectors.spark.batch.sink_group import SinkGroup
from onceflow.core.errors import ConfigError
from onceflow.core.msgspec_decoders import json_decoder
from onceflow.core.protocol.log.rules import NO_ATTEMPT
from onceflow.core.spi import Sink
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.core.storage.filesystems.local import CHECKPOINT_STORAGE
from onceflow.sinks.sql.sink import SqlSink

_FILE = "targets.json"
_TWO_TARGETS = "earlier rows would be in one target and later rows in another. Nothing was written"
_NEW_QUERY = "To have all rows in the new target, begin a new query, with a new checkpointLocation"


class _Note(msgspec.Struct, frozen=True):
    sink_id: str
    targets: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NotedSinks:
    """What the checkpoint says of the targets of a query. Any process of the driver."""

    checkpoint: str
    target: BatchTarget

    def require(self) -> None:
        """Raise ConfigError unless each sink of the query writes where it has written before.

        A sink that has decided nothing yet may write anywhere. Changes nothing.

        Raises:
            ConfigError: It writes elsewhere; says how to go on.
            SinkError, StorageError: The target or the checkpoint cannot be read now.
        """
        noted = self._read()
        if noted.sink_id != self.target.sink_id:
            raise ConfigError(
                f"this query has written under sink id {noted.sink_id!r}, and now it would under"
                f" {self.target.sink_id!r}: what it has decided there would not be known here. Was"
                f" its checkpoint moved? Then give it option sinkId={noted.sink_id}"
            )
        for sink_id, (name, sink) in self._sinks().items():
            former, target = noted.targets.get(name), _describe_target(sink)
            if former is None:
                continue
            if former != target:
                raise ConfigError(
                    f"this query has written to {former}, and now it would write to {target}:"
                    f" {_TWO_TARGETS}. To go on with {former}, name it as before. To go on with"
                    f" {target}, run the query with {former} until its last batch is written, then"
                    f" delete {self._location}/{_FILE}. {_NEW_QUERY}"
                )
            if isinstance(sink, SqlSink) and not self._is_known(sink, sink_id):
                raise ConfigError(
                    f"this query has written to another database than {sink.endpoint}, which knows"
                    f" nothing of it: {_TWO_TARGETS}. Name the former database; a copy of it must"
                    f" have onceflow's tables, too. {_NEW_QUERY}"
                )

    def note(self) -> None:
        """Remember the targets, before anything is decided. Idempotent.

        Raises:
            SinkError, StorageError: The target cannot be asked, or the checkpoint written.
        """
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

    def _read(self) -> _Note:
        noted = self._location.open(CHECKPOINT_STORAGE).read(_FILE)
        return (
            _Note(self.target.sink_id, {}) if noted is None else json_decoder(_Note).decode(noted)
        )

    def _sinks(self) -> Mapping[str, tuple[str, Sink]]:
        """Return name and sink by sink id; a format has one sink, without a name."""
        sink, sink_id = self.target.sink, self.target.sink_id
        if not isinstance(sink, SinkGroup):
            return {sink_id: ("", sink)}
        names = sink.names(sink_id)
        return {part_id: (name, sink.parts[name]) for part_id, name in names.items()}

    def _is_known(self, sink: SqlSink, sink_id: str) -> bool:
        """Return whether the database remembers a claim of `sink_id`, or may not be asked."""
        context = replace(self.target.committer_context(NO_ATTEMPT), uid=sink_id, sink_id=sink_id)
        record = sink.target_record(context)
        return record is None or record.attempt > NO_ATTEMPT

    @property
    def _location(self) -> FileLocation:
        return FileLocation.parse(f"{self.checkpoint}/onceflow", publish="auto", options={})


def _describe_target(sink: Sink) -> str:
    """Return what tells the sink's target from others of its server; empty: nothing does."""
    if isinstance(sink, SqlSink):
        column = f" and tables of column {sink.table_column}" if sink.table_column else ""
        return f"table {sink.resolve_table()}{column}"
    # A sink's module imports its client: only that of the sink at hand is imported already.
    if is_kafka(sink):
        from onceflow.sinks.kafka.sink import KafkaSink

        assert isinstance(sink, KafkaSink)
        return f"topic {', '.join(sorted(sink.settings.topics))}"
    return ""
