"""Tests the decisions of a slot for messages of its driver and its parts in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
from tests.unit.protocol.checkpoints.coordination import snapshot

from onceflow.core.errors import BadRecord
from onceflow.core.protocol import messages
from onceflow.core.protocol.checkpoints.decisions import (
    Barrier,
    CheckpointKind,
    NotifyAbort,
)
from onceflow.core.protocol.ids import GENESIS, CheckpointId, SubtaskRef
from onceflow.core.protocol.loops import slot

REF = SubtaskRef("sink", 0)
CHECKPOINT = CheckpointId(1)
DEPLOY = messages.Deploy(("here",), GENESIS, CHECKPOINT, (), (), b"")
ACK = messages.Acked(CHECKPOINT, snapshot(REF))
TRIGGER = Barrier(CHECKPOINT, CheckpointKind.PERIODIC, 0)
PROGRESS = messages.SinkCommitted(REF, "out", CHECKPOINT, 1.0)
COMPLETE = messages.Complete(CHECKPOINT, {})

_D = TypeVar("_D")


class Driving:
    """Feeds facts to a slot's loop, whose parts close at once, and keeps every decision."""

    def __init__(self) -> None:
        self.now_s = self.heard_at_s = 1000.0
        self.loop = slot.SlotLoop(1.0, 30.0, self.now_s)
        self.decisions: list[slot.SlotDecision] = []
        self.closes_in_time = True
        self.last_reports: tuple[slot.SlotFact, ...] = ()
        """What parts report while they close."""

    def on(self, *facts: slot.SlotFact) -> None:
        for fact in facts:
            self._take(self.loop.on(fact, self.now_s))

    def tick(self, after_s: float, *, hears: bool = True) -> None:
        self.now_s += after_s
        if hears:
            self.heard_at_s = self.now_s
        self._take(self.loop.tick(self.heard_at_s, self.now_s))

    def _take(self, decisions: tuple[slot.SlotDecision, ...]) -> None:
        for decision in decisions:
            self.decisions.append(decision)
            if isinstance(decision, slot.CloseParts):
                self.on(*self.last_reports, slot.PartsClosed(self.closes_in_time))

    def of_type(self, wanted: type[_D]) -> list[_D]:
        return [decision for decision in self.decisions if isinstance(decision, wanted)]

    def run(self) -> None:
        self.on(DEPLOY, slot.RestoreEnded())


def test_a_slot_that_is_deployed_restores_and_then_starts() -> None:
    driving = Driving()
    driving.on(DEPLOY)
    assert driving.decisions == [DEPLOY]
    driving.on(TRIGGER, COMPLETE, PROGRESS, messages.GloballyCommitted("out", CHECKPOINT))
    assert len(driving.decisions) == 1, "subtasks that are not there are posted nothing"
    driving.on(slot.RestoreEnded())
    assert driving.decisions[1:] == [slot.StartSubtasks()]


def test_what_the_driver_says_reaches_the_subtasks_and_the_committers() -> None:
    driving = Driving()
    driving.run()
    driving.decisions.clear()
    abort, offer = NotifyAbort(CHECKPOINT, "late"), messages.OfferSplits("source", ())
    globally = messages.GloballyCommitted("out", CHECKPOINT)
    driving.on(TRIGGER, offer, abort, COMPLETE, globally, messages.Heartbeat())
    assert driving.decisions == [
        TRIGGER,
        offer,
        abort,
        COMPLETE,
        globally,
    ]


def test_what_parts_report_reaches_the_driver() -> None:
    driving = Driving()
    driving.run()
    driving.decisions.clear()
    frozen = slot.SnapshotFrozen(REF, CHECKPOINT)
    declined, exhausted = messages.Declined(CHECKPOINT, REF, "full"), messages.SourceExhausted(REF)
    driving.on(frozen, ACK, declined, exhausted, PROGRESS)
    assert driving.decisions == [
        frozen,
        ACK,
        declined,
        exhausted,
        PROGRESS,
    ]


def test_only_the_first_failure_is_told_and_none_once_the_slot_closes() -> None:
    driving = Driving()
    driving.run()
    first, second = BadRecord("row 7"), BadRecord("row 8")
    driving.on(messages.PartFailed(first), messages.PartFailed(second))
    assert [failure.error for failure in driving.of_type(messages.PartFailed)] == [first]
    driving = Driving()
    driving.run()
    driving.last_reports = (messages.PartFailed(first),)
    driving.on(messages.Shutdown("over"))
    assert not driving.of_type(messages.PartFailed)
    assert driving.decisions[-1] == slot.EndSlot("over")


def test_a_slot_that_hears_nothing_of_its_driver_or_loses_it_exits() -> None:
    driving = Driving()
    driving.run()
    driving.tick(30.0, hears=False)
    assert driving.of_type(slot.SendHeartbeat) == [slot.SendHeartbeat()]
    driving.tick(1.0, hears=False)
    assert driving.of_type(slot.ExitHard) == [slot.ExitHard("the driver has sent nothing for 31 s")]
    driving = Driving()
    driving.on(slot.DriverLost("the job's driver has closed the connection"))
    assert driving.decisions == [slot.ExitHard("the job's driver has closed the connection")]
    driving.on(ACK)
    driving.tick(1.0)
    assert len(driving.decisions) == 1


def test_heartbeats_are_sent_once_an_interval() -> None:
    driving = Driving()
    for _ in range(8):
        assert 0 < driving.loop.wait_s(driving.now_s) <= 1.0
        driving.tick(0.25)
    assert len(driving.of_type(slot.SendHeartbeat)) == 2


def test_what_is_reported_before_the_end_is_told_before_it() -> None:
    """The files of a late ack are deleted by the driver, which must hear of it (I9)."""
    driving = Driving()
    driving.run()
    driving.last_reports = (ACK, PROGRESS, messages.SourceExhausted(REF))
    driving.on(messages.Shutdown("over"))
    deadline_s = driving.now_s + slot.CLOSE_TIMEOUT_S
    assert driving.decisions[2:] == [
        slot.BeginClosing(),
        slot.CloseParts("over", deadline_s),
        ACK,
        PROGRESS,
        slot.SayClosed(deadline_s),
        slot.EndSlot("over"),
    ]


def test_a_part_that_hangs_ends_the_process_after_the_driver_was_told() -> None:
    driving = Driving()
    driving.run()
    driving.closes_in_time = False
    driving.on(messages.Shutdown("over"))
    assert driving.of_type(slot.SayClosed)
    assert driving.decisions[-1] == slot.ExitHard(
        "over; the slot did not finish closing within 5.0 s"
    )


def test_a_slot_that_restores_ends_that_first_and_no_later_than_its_deadline() -> None:
    driving = Driving()
    driving.on(DEPLOY, messages.Shutdown("over"), messages.Shutdown("again"), TRIGGER)
    assert driving.decisions[1:] == [slot.BeginClosing()]
    assert driving.loop.wait_s(driving.now_s) == slot.CLOSE_TIMEOUT_S
    driving.on(slot.RestoreEnded())
    assert driving.of_type(slot.StartSubtasks), "they close their operators"
    assert driving.decisions[-1] == slot.EndSlot("over")
    driving = Driving()
    driving.last_reports = (slot.RestoreEnded(),)
    driving.on(DEPLOY, messages.Shutdown("over"))
    driving.tick(slot.CLOSE_TIMEOUT_S)
    assert not driving.of_type(slot.StartSubtasks)
    assert len(driving.of_type(slot.CloseParts)) == 1
    assert driving.decisions[-1] == slot.ExitHard(
        "over; the slot did not finish closing within 5.0 s"
    )


@pytest.mark.parametrize("closes_first", [False, True])
def test_a_slot_that_was_restored_in_part_does_not_live_on(closes_first: bool) -> None:
    driving = Driving()
    failed = slot.RestoreEnded(BadRecord("row 7"), leaves_parts=True)
    steps: list[slot.SlotFact] = [failed, messages.Shutdown("over")]
    driving.on(DEPLOY, *(reversed(steps) if closes_first else steps))
    assert len(driving.of_type(messages.PartFailed)) == (not closes_first)
    assert driving.decisions[-1] == slot.ExitHard(
        "over; only a part of the slot's state was restored"
    )


def test_a_slot_that_was_not_deployed_leaves_when_it_is_told() -> None:
    driving = Driving()
    driving.on(messages.Shutdown("attempt 1 is over; 2 runs"))
    assert driving.decisions[-1] == slot.EndSlot("attempt 1 is over; 2 runs")


MOMENTS: tuple[Callable[[Driving], None], ...] = (
    lambda _: None,
    lambda driving: driving.on(DEPLOY),
    Driving.run,
)


@pytest.mark.parametrize("moment", MOMENTS, ids=["waiting", "restoring", "running"])
def test_a_shutdown_at_every_moment_ends_the_slot_with_a_word_to_the_driver(
    moment: Callable[[Driving], None],
) -> None:
    driving = Driving()
    moment(driving)
    driving.on(messages.Shutdown("over"))
    driving.on(slot.RestoreEnded())
    driving.tick(slot.CLOSE_TIMEOUT_S)
    assert len(driving.of_type(slot.SayClosed)) == 1
    assert driving.decisions[-1] == slot.EndSlot("over")
