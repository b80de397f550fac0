"""Savepoints of a world: how a driver writes one, and how a job starts from one.

Production's coordinator and rules decide. The registry of requests is a stand-in, because that of
production waits on locks and timers. Like production's, it makes a savepoint whole in one write,
and deletes what it may have written before it reports a failure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from tests.exploration import calls
from tests.exploration.calls import Calls
from tests.exploration.ports import JOB

from onceflow.core.errors import SavepointRefused
from onceflow.core.protocol.checkpoints.decisions import SavepointRequest
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.log.memory import LogMemory
from onceflow.core.protocol.savepoints.savepoint import Savepoint
from onceflow.core.runtime.driver.savepoint_restore import RestoreFrom, SavepointRestore

if TYPE_CHECKING:
    from onceflow.core.storage.log.decision_log import DecisionLog

LOG_ID: Final = "log"
PLACE: Final = "kept"

# --- writing -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saving:
    """A savepoint that an attempt has begun, and that is not answered or not cleaned up."""

    request: SavepointRequest
    stage: Literal["acks", "copying", "finishing", "deleting"] = "acks"
    completed: CompletedCheckpoint | None = None
    failure: str = ""


def copy_state(asked: Calls) -> None:
    """Copy the state of a savepoint."""
    asked.ask(calls.CopyState())


def finish(asked: Calls, savepoint: Savepoint) -> None:
    """Make a savepoint whole."""
    asked.ask(calls.WriteMetadata(savepoint))


def delete(asked: Calls) -> None:
    """Delete a savepoint that may be whole."""
    asked.ask(calls.DeleteMetadata())


def content_of(saving: Saving, memory: LogMemory) -> Savepoint:
    assert saving.completed is not None
    return Savepoint(saving.request.id, JOB, LOG_ID, saving.request.kind, saving.completed, memory)


# --- starting ------------------------------------------------------------------------------------

Known: TypeAlias = tuple[tuple[str, Any], ...]
"""The attributes of a `SavepointRestore` between two procedures of its driver."""

_KEPT = ("_savepoint", "_begun_before", "_last_attempt", "_records", "_lacks_own")


class _Directory:
    """The directory of the savepoint."""

    def __init__(self, asked: Calls) -> None:
        self._asked = asked

    def read(self) -> Savepoint:
        savepoint: Savepoint | None = self._asked.ask(calls.ReadMetadata())
        if savepoint is None:
            raise SavepointRefused(f"{self} holds no whole savepoint")
        return savepoint

    def reader(self) -> None:
        pass

    def __str__(self) -> str:
        return PLACE


def open_restore(asked: Calls, log: DecisionLog, known: Known) -> SavepointRestore:
    """Return production's start from the savepoint, as far as the driver has come with it."""

    def import_staged(*_: object) -> None:
        """Copy nothing: rows of these worlds never wait in checkpoint storage."""

    def with_state_of(decision: CompletedCheckpoint, _: object) -> CompletedCheckpoint:
        return decision

    storage: Any = SimpleNamespace(
        job=JOB, log=log, log_id=LOG_ID, import_staged=import_staged, with_state_of=with_state_of
    )
    directory: Any = _Directory(asked)
    restore = SavepointRestore(
        RestoreFrom(PLACE, claim=False, allow_rewind=False), directory, storage, ""
    )
    for name, value in known:
        setattr(restore, name, value)
    return restore


def known_of(restore: SavepointRestore) -> Known:
    return tuple((name, getattr(restore, name)) for name in _KEPT)


def note_failure(saving: Saving, reason: str) -> Saving:
    """Return `saving` with the reason for which it has failed; the first reason stays."""
    return replace(saving, failure=saving.failure or reason)
