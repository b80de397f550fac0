"""The file system and the sinks of a world, as production's code asks them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import pyarrow as pa
from tests.exploration import calls
from tests.exploration.calls import Calls

from onceflow.core import spi
from onceflow.core.errors import Fenced
from onceflow.core.plan.graph import Graph
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.spi import CommittedBy, CommitterContext
from onceflow.core.storage.filesystems import filesystem
from onceflow.core.storage.layout import JobPaths
from onceflow.core.storage.log.decision_log import FORMAT, DecisionLog
from onceflow.core.storage.log.record_codec import seal

JOB: Final = "job"
PATHS: Final = JobPaths(JOB)
_META: Final = seal(msgspec.json.encode({"format": FORMAT, "log_id": "log"}))[0]


class NoReply(Exception):
    """Raised by a target whose reply was lost."""


class Files(filesystem.CreatesAtomically):
    """The storage of the decision log. A record never changes, so it is read once."""

    def __init__(self, asked: Calls) -> None:
        self._asked = asked
        self._known: dict[int, bytes] = {}
        self.exists = False
        """True if the last record to create was there already."""

    def location(self, path: str) -> str:
        return path

    def create_if_absent(self, path: str, data: bytes) -> filesystem.CreateOutcome:
        sequence = _sequence_of(path)
        existing: bytes | None = self._asked.ask(calls.CreateRecord(sequence, data))
        self._known[sequence] = data if existing is None else existing
        self.exists = existing is not None
        return filesystem.Created() if existing is None else filesystem.AlreadyExists(existing)

    def read(self, path: str) -> bytes | None:
        if path == PATHS.meta:
            return _META
        if path == PATHS.pruned:
            return None
        sequence = _sequence_of(path)
        if sequence not in self._known:
            data: bytes | None = self._asked.ask(calls.ReadRecord(sequence))
            if data is None:
                return None
            self._known[sequence] = data
        return self._known[sequence]

    def list(self, directory: str) -> tuple[str, ...]:
        assert directory == PATHS.log, directory
        records: tuple[tuple[int, bytes], ...] = self._asked.ask(calls.ListRecords())
        self._known.update(records)
        return tuple(PATHS.record(sequence).rpartition("/")[2] for sequence, _ in records)

    def make_directory(self, path: str) -> None:
        del path

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        raise NotImplementedError(path)

    def read_chunks(self, path: str) -> Iterator[bytes] | None:
        raise NotImplementedError(path)

    def size(self, path: str) -> int | None:
        raise NotImplementedError(path)

    def list_unfinished(self, directory: str) -> tuple[filesystem.Unfinished, ...]:
        raise NotImplementedError(directory)

    def delete(self, path: str) -> None:
        raise NotImplementedError(path)

    def delete_tree(self, path: str) -> None:
        raise NotImplementedError(path)


def _sequence_of(path: str) -> int:
    sequence = PATHS.sequence_of(path.rpartition("/")[2])
    assert sequence is not None, path
    return sequence


def open_log(asked: Calls) -> DecisionLog:
    """Return production's decision log, which asks through `asked`."""
    return DecisionLog.open(Files(asked), PATHS)


# --- sinks ---------------------------------------------------------------------------------------


class _Committer(spi.Committer):
    def __init__(self, asked: Calls, sink_id: str) -> None:
        self.asked, self.sink_id = asked, sink_id

    def in_doubt(self) -> Sequence[Committable]:
        listed: tuple[Committable, ...] = self.asked.ask(calls.ListInDoubt(self.sink_id))
        return listed

    def close(self) -> None:
        pass


class TwoPhaseCommitter(_Committer):
    """Commits prepared transactions, each in one request."""

    def commit(self, committable: Committable) -> CommitOutcome:
        try:
            outcome: CommitOutcome = self.asked.ask(
                calls.CommitTransaction(committable.transaction)
            )
        except NoReply as error:
            return Unknown(str(error))
        return outcome

    def abort(self, committable: Committable) -> AbortOutcome:
        try:
            outcome: AbortOutcome = self.asked.ask(calls.RollBack(committable.transaction))
        except NoReply as error:
            return Unknown(str(error))
        return outcome


class StagedCommitter(_Committer):
    """Applies rows that wait in checkpoint storage: it reads them, and then sends them."""

    def commit(self, committable: Committable) -> CommitOutcome:
        transaction = committable.transaction
        try:
            rows: tuple[int, ...] | None = self.asked.ask(calls.ReadStaged(transaction))
            if rows is None:
                proven: bool = self.asked.ask(calls.HasProof(transaction))
                return AlreadyCommitted() if proven else Lost("neither staged nor proved")
            applied: bool = self.asked.ask(calls.ApplyStaged(transaction, rows))
        except NoReply as error:
            return RetryLater(str(error))
        return Committed() if applied else AlreadyCommitted()

    def abort(self, committable: Committable) -> AbortOutcome:
        transaction = committable.transaction
        try:
            if self.asked.ask(calls.HasProof(transaction)):
                return AlreadyCommitted()
            self.asked.ask(calls.RollBack(transaction))
        except NoReply as error:
            return RetryLater(str(error))
        return Aborted()


class VersionCommitter(spi.GlobalCommitter):
    """Commits whole checkpoints, each as one version."""

    def __init__(self, asked: Calls, sink_id: str) -> None:
        self.asked, self.sink_id = asked, sink_id

    def in_doubt(self) -> Sequence[Committable]:
        listed: tuple[Committable, ...] = self.asked.ask(calls.ListInDoubt(self.sink_id))
        return listed

    def read_committed_through(self) -> CheckpointId:
        through: CheckpointId = self.asked.ask(calls.ReadThrough(self.sink_id))
        return through

    def commit_checkpoint(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> CommitOutcome:
        try:
            outcome: CommitOutcome = self.asked.ask(
                calls.CommitVersion(self.sink_id, checkpoint, tuple(committables))
            )
        except NoReply as error:
            return Unknown(str(error))
        return outcome

    def abort(self, committable: Committable) -> AbortOutcome:
        try:
            outcome: AbortOutcome = self.asked.ask(calls.RollBack(committable.transaction))
        except NoReply as error:
            return Unknown(str(error))
        return outcome

    def close(self) -> None:
        pass


COMMITTERS: Final[dict[str, Callable[[Calls, str], spi.Committer]]] = {
    "two-phase": TwoPhaseCommitter,
    "staged": StagedCommitter,
    "versions": VersionCommitter,
}
"""The committer of each kind of sink."""


class ExploredSink(spi.Sink):
    """A sink of one kind whose target is part of the explored state."""

    def __init__(self, asked: Calls, kind: str) -> None:
        self._asked, self._kind = asked, kind

    @property
    def committed_by(self) -> CommittedBy:
        return CommittedBy.DRIVER if self._kind == "versions" else CommittedBy.SLOTS

    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        del schema
        if not self._asked.ask(calls.OpenTarget(context.sink_id, context.attempt)):
            raise Fenced(f"a newer attempt has opened {context.sink_id}")

    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        record: TargetRecord | None = self._asked.ask(calls.ReadTarget(context.sink_id))
        return record

    def writer(self, context: spi.WriterContext) -> spi.SinkWriter:
        raise NotImplementedError

    def committer(self, context: CommitterContext) -> spi.Committer:
        return COMMITTERS[self._kind](self._asked, context.sink_id)


@dataclass(frozen=True, slots=True)
class SinkOfWorld:
    """A sink of a world: its id, which is its uid as well, and its kind."""

    sink_id: str
    kind: str


def graph_of(asked: Calls, sinks: Sequence[SinkOfWorld]) -> Graph:
    """Return a stand-in for a graph: recovery asks it for its sinks and nothing else."""
    schema = pa.schema([])
    found = [
        (
            SimpleNamespace(uid=sink.sink_id, schema=schema),
            SimpleNamespace(sink=ExploredSink(asked, sink.kind), sink_id=sink.sink_id),
        )
        for sink in sinks
    ]
    graph: Any = SimpleNamespace(sinks=lambda: found)
    return graph  # type: ignore[no-any-return]
