"""Broken loops of an attempt; each must be caught, as those of `mutants`."""

from __future__ import annotations

from tests.simulation.variant import Variant

from onceflow.core.protocol.checkpoints.decisions import AppendDecision, SavepointRequest
from onceflow.core.protocol.loops import attempt_facts
from onceflow.core.protocol.loops.attempt import AttemptLoop
from onceflow.core.protocol.loops.attempt_phases import Coordinating, Gathering, Investigating


class _DropsSavepointWhileAppending(AttemptLoop):
    """Forgets a savepoint that is asked for while a decision is appended."""

    def _hear(self, fact: attempt_facts.AttemptFact, now_s: float) -> None:
        phase = self._phase
        appends = isinstance(phase, Coordinating) and isinstance(phase.waits_for, AppendDecision)
        if not (appends and isinstance(fact, SavepointRequest)):
            super()._hear(fact, now_s)


class _DropsSavepointBeforeRunning(AttemptLoop):
    """Forgets a savepoint that is asked for before every slot runs."""

    def _hear(self, fact: attempt_facts.AttemptFact, now_s: float) -> None:
        if self._coordinator or not isinstance(fact, SavepointRequest):
            super()._hear(fact, now_s)


class _DropsWhileInvestigating(AttemptLoop):
    """Forgets what is asked for while it looks for the cause of a failure."""

    def _investigate(self, phase: Investigating, fact: attempt_facts.AttemptFact) -> None:
        if not isinstance(fact, SavepointRequest):
            super()._investigate(phase, fact)


class _KeepsWhatIsBegun(AttemptLoop):
    """Leaves a savepoint that it has begun to the next attempt, too."""

    def _begin_savepoint(self, begun: attempt_facts.SavepointBegun, now_s: float) -> None:
        super()._begin_savepoint(begun, now_s)
        self._left.append(begun.request)


class _AnswersTwice(AttemptLoop):
    """Says that a savepoint is written which it has given up, and said so."""

    def _hear(self, fact: attempt_facts.AttemptFact, now_s: float) -> None:
        pending = self._coordinator.pending if self._coordinator else ()
        if isinstance(fact, attempt_facts.SavepointWritten) and fact.checkpoint not in pending:
            self._decide(fact)
        super()._hear(fact, now_s)


class _ForgetsCancel(AttemptLoop):
    """Forgets that the job is cancelled while it waits for slots."""

    def _hear(self, fact: attempt_facts.AttemptFact, now_s: float) -> None:
        phase = self._phase
        waits = isinstance(phase, Gathering) and not phase.has_all_slots
        if not (waits and isinstance(fact, attempt_facts.CancelRequested)):
            super()._hear(fact, now_s)


LOOP_MUTANTS: tuple[Variant, ...] = (
    Variant("drops a savepoint while it appends", attempt_loop=_DropsSavepointWhileAppending),
    Variant("drops a savepoint before slots run", attempt_loop=_DropsSavepointBeforeRunning),
    Variant(
        "drops a savepoint while it looks into a loss",
        attempt_loop=_DropsWhileInvestigating,
    ),
    Variant("asks again for a savepoint that is begun", attempt_loop=_KeepsWhatIsBegun),
    Variant("answers a savepoint twice", attempt_loop=_AnswersTwice),
    Variant("forgets a cancel while it waits for slots", attempt_loop=_ForgetsCancel),
)
