"""A group of sinks that acts as one sink: their rows become visible by one decision.

Each part has its own sink id, derived from the group's. The first part has the group's own id. If
the first part is a database, it keeps the decisions. Tasks write through the parts. Claims, commits
and roll-backs go to all parts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import pyarrow as pa
from typing_extensions import override

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.committables import AbortOutcome, CommitOutcome, Committable
from onceflow.core.protocol.ids import SINK_ID_LENGTH_MAX, CheckpointId
from onceflow.core.spi import Committer, CommitterContext, Sink, SinkWriter, WriterContext
from onceflow.core.spi.staging import StagingArea

_DIGEST_LENGTH = 10


@dataclass(frozen=True)
class SinkGroup(Sink):
    """A group of sinks by name. It is opened with a schema from `group_schema`."""

    parts: Mapping[str, Sink]
    staging: Callable[[str], StagingArea]
    """A function that returns the staging area of a sink id."""

    @override
    def validate(self, context: CommitterContext, schema: pa.Schema) -> None:
        for name, sink in self.parts.items():
            sink.validate(self._context(context, name), part_schema(schema, name))

    @override
    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        """Open the parts in order: the fence of the first part is the group's.

        After a crash some parts may have an attempt that no run uses.
        """
        for name, sink in self.parts.items():
            sink.open(self._context(context, name), part_schema(schema, name))

    @override
    def writer(self, context: WriterContext) -> SinkWriter:
        raise NotImplementedError("a group has no writer: tasks write through its parts")

    @override
    def committer(self, context: CommitterContext) -> Committer:
        return _GroupCommitter(
            {
                self.part_id(context.sink_id, name): sink.committer(self._context(context, name))
                for name, sink in self.parts.items()
            }
        )

    def part_id(self, sink_id: str, name: str) -> str:
        """Return the sink id of part `name` in the group with `sink_id`.

        The first part has the group's id. The ids of the others consist of their name and a hash.
        """
        # So the decisions stay where they are if a single sink becomes a group.
        if name == next(iter(self.parts)):
            return sink_id
        digest = hashlib.sha256(f"{sink_id}.{name}".encode()).hexdigest()[:_DIGEST_LENGTH]
        readable = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        return f"{readable[: SINK_ID_LENGTH_MAX - _DIGEST_LENGTH - 1]}-{digest}"

    def names(self, sink_id: str) -> Mapping[str, str]:
        """Return the name of each part by its sink id."""
        return {self.part_id(sink_id, name): name for name in self.parts}

    def part_ids(self, sink_id: str) -> tuple[str, ...]:
        """Return the sink ids of all parts."""
        return tuple(self.part_id(sink_id, name) for name in self.parts)

    def _context(self, context: CommitterContext, name: str) -> CommitterContext:
        sink_id = self.part_id(context.sink_id, name)
        return replace(context, sink_id=sink_id, uid=sink_id, staging=self.staging(sink_id))


class _GroupCommitter(Committer):
    def __init__(self, committers: Mapping[str, Committer]) -> None:
        self._committers = committers

    @override
    def commit(self, committable: Committable) -> CommitOutcome:
        return self._of(committable).commit(committable)

    @override
    def abort(self, committable: Committable) -> AbortOutcome:
        return self._of(committable).abort(committable)

    @override
    def in_doubt(self) -> Sequence[Committable]:
        return tuple(
            committable
            for committer in self._committers.values()
            for committable in committer.in_doubt()
        )

    @override
    def find_prepare_time(self, committable: Committable) -> datetime | None:
        return self._of(committable).find_prepare_time(committable)

    @override
    def prune(self, before: CheckpointId) -> None:
        for committer in self._committers.values():
            committer.prune(before)

    @override
    def close(self) -> None:
        for committer in self._committers.values():
            committer.close()

    def _of(self, committable: Committable) -> Committer:
        committer = self._committers.get(committable.transaction.sink_id)
        if committer is None:
            raise ConfigError(
                f"{committable} is decided, but none of the sinks {', '.join(self._committers)}"
                " owns it. Run once more with the sinks of that batch"
            )
        return committer


def group_schema(schemas: Mapping[str, pa.Schema]) -> pa.Schema:
    """Return one schema that contains the schemas of all parts."""
    return pa.schema([pa.field(name, pa.struct(list(schema))) for name, schema in schemas.items()])


def part_schema(schema: pa.Schema, name: str) -> pa.Schema:
    """Return the schema of part `name` in a schema from `group_schema`."""
    kind = schema.field(name).type
    assert isinstance(kind, pa.StructType)
    return pa.schema([kind.field(index) for index in range(kind.num_fields)])
