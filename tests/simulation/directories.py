"""The directories of savepoints that slots write to. Mirrors SavepointDirectory and its mark.

    marked --the driver writes the metadata--> whole
      +------the driver gives it up----------> given up: the mark goes first, then the files

A slot writes into a directory only if it reads the mark there first, and reads it again when all is
written: a directory that has lost its mark meanwhile may have been emptied before the last file.
"""

from __future__ import annotations

import random
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.clock import Violation

from onceflow.core.protocol.checkpoints.decisions import SavepointTarget, WriteSavepoint
from onceflow.core.protocol.checkpoints.snapshots import StateHandle

if TYPE_CHECKING:
    from tests.simulation.slots import Slot


@dataclass
class Directory:
    """One directory of a savepoint, as whoever has that disk sees it."""

    mark: str = ""
    files: dict[str, Any] = field(default_factory=dict[str, Any])
    is_given_up: bool = False
    acked: set[str] = field(default_factory=set[str])
    """Files of slots that have ended their upload: one that dies before leaves what it wrote."""

    def write(self, handle: StateHandle, value: dict[int, int]) -> None:
        if handle.path in self.files:
            raise Violation(f"I9 file {handle.path} of a savepoint is written twice")
        self.files[handle.path] = copy(value)

    def delete(self, handle: StateHandle) -> None:
        self.files.pop(handle.path, None)


class Directories:
    """All directories of savepoints, and which slots see them; drawn apart, as savepoints are."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        # The number keeps it out of the schedules that `caught` names for what is rarely caught.
        self._is_drawn = random.Random(f"reaching 852 {seed}").random() < 0.35
        self._of: dict[str, Directory] = {}

    def begin(self, location: str) -> SavepointTarget | None:
        """Create a directory with its mark; None: slots do not try to write there."""
        self._of[location] = Directory(mark=location)
        return SavepointTarget(location, location) if self._is_drawn else None

    def open(self, target: SavepointTarget, slot: Slot) -> Directory | None:
        """Return the directory that the slot writes to; None: it uploads to the job's storage."""
        rng = random.Random(f"reaches {self._seed} {slot.deploy.attempt} {slot.index}")
        is_shared = rng.random() < 0.7
        # Another machine has a directory of that name, on a disk of its own.
        seen = self._of[target.location] if is_shared else Directory()
        trusts = slot.world.variant.trusts_locations
        return seen if trusts or seen.mark == target.id else None

    def give_up(self, location: str) -> None:
        """Delete what there is, the mark before all."""
        directory = self._of[location]
        directory.mark, directory.is_given_up = "", True
        directory.files.clear()

    def finish(self, decision: WriteSavepoint) -> dict[str, dict[int, int]]:
        """Return what slots have written into the directory, all of which must be there.

        From now on the directory has no mark, and the user has it.
        """
        directory = self._of[decision.request.id]
        directory.mark = ""
        named = {
            handle.path
            for snapshot in decision.completed.snapshots
            if snapshot.subtask in decision.in_target
            for operator in snapshot.operators
            for handle in (*operator.keyed, *operator.raw)
        }
        if missing := sorted(named - directory.files.keys()):
            raise Violation(f"I6 files {missing} are not in the directory of their savepoint")
        if extra := sorted(directory.files.keys() - named):
            raise Violation(f"I9 a savepoint has files {extra}, and does not name them")
        return directory.files

    def check(self) -> None:
        """Raise Violation if anything is left of what was given up, though its slots lived on."""
        for location, directory in self._of.items():
            left = sorted(directory.files.keys() & directory.acked)
            if directory.is_given_up and left:
                raise Violation(f"I9 savepoint {location} was given up, and {left} is left")
