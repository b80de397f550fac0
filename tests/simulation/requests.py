"""The requests of users to one driver, and the answers. Mirrors core/runtime/driver/savepoints.py.

    asked --begun by an attempt--> under way --written--> told the place
      +--the job ends--+--aborted, or the attempt ends--> told why not

Who has asked is told once. Until then the request is with the driver, with the loop of its attempt,
or under way: one that is nowhere is lost, though the end of the job would hide it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.simulation.clock import Violation
from tests.simulation.directories import Directories

from onceflow.core.protocol.checkpoints.decisions import CheckpointKind, SavepointRequest
from onceflow.core.protocol.loops.attempt_facts import Request


@dataclass
class _Asked:
    request: SavepointRequest
    is_under_way: bool = False
    answers: list[str] = field(default_factory=list[str])


class SavepointDesk:
    """The savepoints that one driver is asked for."""

    def __init__(self, driver: str, directories: Directories) -> None:
        self._driver = driver
        self._directories = directories
        self._asked: dict[str, _Asked] = {}

    def ask(self, kind: CheckpointKind) -> SavepointRequest:
        name = f"{self._driver}-{len(self._asked)}"
        request = SavepointRequest(name, kind, target=self._directories.begin(name))
        self._asked[request.id] = _Asked(request)
        return request

    def begin(self, request: SavepointRequest) -> bool:
        """Return whether the request stands: nobody gives it up in the model."""
        asked = self._asked[request.id]
        if asked.is_under_way or asked.answers:
            raise Violation(f"savepoint {request.id} is begun twice")
        asked.is_under_way = True
        return True

    def answer(self, request: SavepointRequest, answer: str = "", *, is_dead: bool = False) -> None:
        """Tell who has asked why there is none; no `answer`: it is written.

        A driver that is dead deletes nothing.
        """
        if answer and not is_dead:
            self._directories.give_up(request.id)
        answers = self._asked[request.id].answers
        answers.append(answer)
        if len(answers) > 1:
            raise Violation(f"who asked for savepoint {request.id} is told {answers}")

    def end_attempt(self) -> None:
        """Answer those that the attempt has begun: they end with it."""
        for asked in self._asked.values():
            if asked.is_under_way and not asked.answers:
                self.answer(asked.request, "the attempt has ended")

    def end_job(self, *, is_dead: bool = False) -> None:
        """Answer all that are left."""
        for asked in self._asked.values():
            if not asked.answers:
                self.answer(asked.request, "the job has ended", is_dead=is_dead)

    def check_kept(self, requests: Iterable[Request]) -> None:
        """Raise Violation unless each that waits is once among `requests`."""
        kept = [request.id for request in requests if isinstance(request, SavepointRequest)]
        for asked in self._asked.values():
            waits = not asked.is_under_way and not asked.answers
            times = kept.count(asked.request.id)
            if waits and times != 1:
                raise Violation(f"savepoint {asked.request.id} waits, and is kept {times} times")
