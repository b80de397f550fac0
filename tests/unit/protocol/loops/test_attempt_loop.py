"""Tests the decisions of an attempt's driver for facts in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.protocol.checkpoints.coordination import ATTEMPT, SOURCES, snapshot
from tests.unit.protocol.loops.attempt_driving import HELLO, LOST, SETTINGS, Driving

from onceflow.core import errors
from onceflow.core.protocol import messages
from onceflow.core.protocol.checkpoints import decisions
from onceflow.core.protocol.checkpoints.coordinator import CheckpointSettings
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.protocol.loops import attempt_facts
from onceflow.core.protocol.loops.attempt import INVESTIGATION_S
from onceflow.core.protocol.loops.slots import SlotRoster
from onceflow.core.protocol.splits import Split
from onceflow.core.storage.log.decision_log import DecisionUnknown

OLDER = AttemptId(ATTEMPT - 1)
MANUAL = attempt_facts.CheckpointRequested(decisions.CheckpointKind.MANUAL)
STOP = attempt_facts.CheckpointRequested(decisions.CheckpointKind.STOP)
SAVEPOINT = decisions.SavepointRequest("kept", decisions.CheckpointKind.SAVEPOINT)
STOP_SAVEPOINT = decisions.SavepointRequest("last", decisions.CheckpointKind.SAVEPOINT_STOP)
CANCEL = attempt_facts.CancelRequested()
CHANNEL_BROKE = messages.Failed(1, "SlotLost", str(LOST), "", "job")


# --- the beginning ----------------------------------------------------------------------------


def test_slots_are_deployed_once_all_are_up_and_sinks_agree_in_either_order() -> None:
    for steps in ((Driving.recover, _join_all), (_join_all, Driving.recover)):
        driving = Driving()
        for step in steps:
            assert not driving.of_type(attempt_facts.DeploySlots)
            step(driving)
        assert len(driving.of_type(attempt_facts.DeploySlots)) == 1
        assert not driving.of_type(attempt_facts.EnterRunning)
        driving.say(messages.Running(("old state",)), 0)
        driving.say(messages.Running(), 1)
        assert len(driving.of_type(attempt_facts.EnterRunning)) == 1
        assert messages.Running(("old state",)) in driving.decisions


def test_a_slot_of_an_older_attempt_is_told_to_leave() -> None:
    driving = Driving()
    driving.on(replace(HELLO, attempt=OLDER))
    assert driving.of_type(attempt_facts.DismissSlot)[0].reason == "attempt 2 has ended; 3 runs"
    assert not driving.of_type(attempt_facts.AdmitSlot)


@pytest.mark.parametrize(
    ("hello", "text"),
    [
        (replace(HELLO, versions={"onceflow": "2"}), "install the same versions"),
        (replace(HELLO, storage_probe=""), "use a directory that every executor shares"),
    ],
)
def test_a_slot_with_other_versions_or_another_storage_is_refused(hello: object, text: str) -> None:
    driving = Driving()
    driving.on(hello)  # type: ignore[arg-type]
    (end,) = driving.of_type(attempt_facts.EndAttempt)
    assert isinstance(end.error, errors.ConfigError)
    assert text in str(end.error)


LOOPBACK = replace(HELLO, host="127.0.1.1", machine="worker", loopback=True)
HERE = replace(HELLO, host="172.17.0.2", machine="left", network_id="stack 1")


def test_slot_that_other_machines_do_not_reach_is_refused_with_the_way_out() -> None:
    driving = Driving()
    driving.on(LOOPBACK)
    error = driving.of_type(attempt_facts.EndAttempt)[0].error
    assert isinstance(error, errors.ConfigError)
    assert "slot 0 on worker listens at 127.0.1.1, a loopback address" in str(error)
    assert "RuntimeSettings(slot_host=…)" in str(error)


def test_slots_at_loopback_take_part_where_the_driver_is_there_too() -> None:
    roster = SlotRoster(replace(SETTINGS, one_machine=True))
    assert roster.find_refusal(LOOPBACK) is None


def test_two_machines_with_one_address_are_refused_by_both_names() -> None:
    roster = SlotRoster(SETTINGS)
    roster.admit(HERE, 0.0)
    other = replace(HERE, slot=1, machine="right", network_id="stack 2")
    refusal = roster.find_refusal(other)
    assert isinstance(refusal, errors.ConfigError)
    assert "slot 0 on left and slot 1 on right" in str(refusal)
    assert "172.17.0.2" in str(refusal)
    assert "RuntimeSettings(slot_host=…)" in str(refusal)


@pytest.mark.parametrize(
    "change", [{"network_id": "stack 1"}, {"network_id": ""}, {"host": "172.17.0.3"}], ids=str
)
def test_slots_of_one_machine_or_of_two_addresses_take_part(change: dict[str, str]) -> None:
    roster = SlotRoster(SETTINGS)
    roster.admit(HERE, 0.0)
    other = replace(HERE, slot=1, network_id="stack 2")
    assert roster.find_refusal(replace(other, **change)) is None  # type: ignore[arg-type]


def test_slots_that_do_not_dial_in_or_do_not_run_in_time_fail_the_attempt() -> None:
    patient = replace(SETTINGS, heartbeat_timeout_s=1e6)
    driving = Driving(patient)
    driving.now_s += 1000.0  # the time begins with the first tick
    driving.join(0)
    driving.tick(60.0)
    assert not driving.error
    driving.tick(0.1)
    assert (
        "after 60 s only 1 of 2 slots up; check that the cluster has 2 free task slots"
        in driving.error
    )
    driving = Driving(patient)
    driving.join(0, 1)
    driving.recover()
    driving.say(messages.Running(), 1)
    driving.tick(60.1)
    assert "after 60 s only 1 of 2 running" in driving.error


def test_sinks_that_do_not_agree_fail_the_attempt_and_slow_ones_name_their_step() -> None:
    driving = Driving()
    driving.on(attempt_facts.RecoveryEnded(OLDER, errors.CommitFailed("of an older attempt")))
    driving.on(attempt_facts.RecoveryEnded(ATTEMPT, errors.CommitFailed("the target is away")))
    assert driving.error == "the target is away"
    driving = Driving()
    driving.join(0, 1)
    driving.tick(20.0)
    assert not driving.error
    driving.step = attempt_facts.RecoveryStep("commit of sink ledger", driving.now_s - 20.5)
    driving.tick()
    assert "has waited 20 s for commit of sink ledger" in driving.error


# --- slots ------------------------------------------------------------------------------------


def test_a_silent_slot_and_one_that_takes_nothing_are_lost() -> None:
    driving = Driving()
    driving.run()
    driving.tick(15.0)
    driving.say(messages.Heartbeat(0), 0)
    driving.tick(15.5)
    assert "slot 1 (process 100 on here) has been silent for 30 s" in driving.error
    driving = Driving()
    driving.run()
    driving.waiting_s = {1: 31.0}
    driving.tick(1.0)
    assert "slot 1 (process 100 on here) has taken no message for 31 s" in driving.error


def test_a_driver_that_stood_still_itself_gives_its_slots_a_fresh_deadline() -> None:
    driving = Driving()
    driving.run()
    driving.waiting_s = {0: 120.0, 1: 120.0}
    driving.tick(120.0)
    assert not driving.error
    driving.waiting_s = {0: 140.0, 1: 140.0}
    driving.tick(20.0)
    driving.say(messages.Heartbeat(0), 0)
    assert not driving.error
    driving.waiting_s = {}
    driving.tick(10.5)
    assert "slot 1 (process 100 on here) has been silent for 30 s" in driving.error


def test_a_slot_that_left_a_driver_that_stood_still_is_not_blamed_for_it() -> None:
    driving = Driving()
    driving.run()
    driving.tick(45.0)
    driving.on(attempt_facts.SlotGone(1, ATTEMPT, "its process 100 ended"))
    assert driving.error.startswith("slot 1 is lost: its process 100 ended")
    assert "this driver: its process did not run for 45 s until 0 s ago" in driving.error
    later = Driving()
    later.run()
    later.tick(45.0)
    for _ in range(4):
        later.tick(10.0)
        later.say(messages.Heartbeat(0), 0)
        later.say(messages.Heartbeat(1), 1)
    later.on(attempt_facts.SlotGone(1, ATTEMPT, "its process 100 ended"))
    assert "did not run for" not in later.error


def test_heartbeats_are_sent_once_an_interval_while_nothing_else_happens() -> None:
    driving = Driving()
    driving.run()
    before = len(driving.of_type(attempt_facts.SendHeartbeats))
    for _ in range(8):
        assert 0 < driving.loop.wait_s(driving.now_s) <= 0.5
        driving.tick(0.25)
    assert len(driving.of_type(attempt_facts.SendHeartbeats)) == before + 2


def test_the_lost_slot_is_named_before_the_channel_that_broke_with_it() -> None:
    driving = Driving()
    driving.run()
    driving.say(CHANNEL_BROKE, 1)
    driving.on(
        attempt_facts.SlotGone(0, OLDER, "of an older attempt"),
        attempt_facts.SlotGone(1, ATTEMPT, "the one that says"),
    )
    assert not driving.is_over
    driving.tick(INVESTIGATION_S / 2)
    driving.on(attempt_facts.SlotGone(0, ATTEMPT, "its process has ended"))
    assert driving.error.startswith("slot 0 is lost: its process has ended")
    assert "slot 1: channel balance[0] from 1 broke" in driving.error


def test_a_channel_that_broke_with_no_slot_lost_is_the_cause_itself() -> None:
    driving = Driving()
    driving.run()
    driving.say(CHANNEL_BROKE, 1)
    assert driving.loop.wait_s(driving.now_s) == pytest.approx(INVESTIGATION_S)
    driving.tick(INVESTIGATION_S - 0.01)
    assert not driving.is_over
    driving.tick(0.02)
    assert driving.error == "slot 1: channel balance[0] from 1 broke"


def test_any_other_failure_of_a_slot_ends_the_attempt_at_once() -> None:
    driving = Driving()
    driving.run()
    driving.say(messages.Failed(1, "BadRecord", "row 7", "", "never"), 1)
    (end,) = driving.of_type(attempt_facts.EndAttempt)
    assert isinstance(end.error, errors.BadRecord)
    assert messages.Failed(1, "BadRecord", "row 7", "", "never") in driving.decisions


def test_what_is_of_another_attempt_changes_nothing() -> None:
    driving = Driving()
    driving.run()
    driving.decisions.clear()
    driving.on(
        attempt_facts.SlotMessageReceived(
            OLDER, 0, messages.Failed(0, "BadRecord", "row 7", "", "never")
        ),
        attempt_facts.SlotGone(0, OLDER, "gone"),
        attempt_facts.SlotsEnded(OLDER, errors.SlotLost("gone")),
        attempt_facts.GlobalCommitEnded(
            OLDER, "out", "out", CheckpointId(1), errors.CommitFailed("away")
        ),
        attempt_facts.DiscoveryAnswered(OLDER, "source", error=errors.SourceError("gone")),
    )
    assert not driving.is_over
    # This decision is repeated at each step.
    assert {type(decision) for decision in driving.decisions} == {attempt_facts.AskBeside}


# --- the coordinator --------------------------------------------------------------------------


def test_what_comes_while_a_decision_is_appended_is_told_after_it_and_in_order() -> None:
    driving = Driving(checkpoints=CheckpointSettings(interval_s=None, max_concurrent=2))
    driving.run()
    driving.on(MANUAL)
    driving.ack_all(2)
    assert len(driving.of_type(decisions.AppendDecision)) == 1
    driving.on(MANUAL, SAVEPOINT)
    driving.say(messages.Acked(CheckpointId(2), snapshot(SOURCES[0])))
    assert driving.triggered == [2]
    assert not driving.of_type(decisions.SavepointRequest)
    driving.tick(3600.0 / 1e3)
    driving.end_append()
    kinds = [trigger.kind for trigger in driving.of_type(decisions.Barrier)]
    assert kinds == [
        decisions.CheckpointKind.MANUAL,
        decisions.CheckpointKind.MANUAL,
        decisions.CheckpointKind.SAVEPOINT,
    ]
    complete = driving.decisions.index(driving.of_type(decisions.NotifyComplete)[0])
    assert complete < driving.decisions.index(driving.of_type(decisions.Barrier)[1])


def test_a_refused_append_goes_on_without_it_and_an_unknown_one_ends_the_attempt() -> None:
    tolerant = CheckpointSettings(interval_s=None, tolerable_failures=1)
    for error, ends in (
        (errors.StorageError("no space"), False),
        (DecisionUnknown("who knows"), True),
    ):
        driving = Driving(checkpoints=tolerant)
        driving.run()
        driving.on(MANUAL)
        driving.ack_all(2)
        driving.end_append(error)
        assert driving.is_over == ends
        assert not driving.of_type(decisions.NotifyComplete)
        assert driving.loop.unanswered == (MANUAL,)


def test_one_failure_too_many_ends_the_attempt_and_the_request_stays() -> None:
    driving = Driving()
    driving.run()
    driving.on(STOP)
    driving.say(messages.Declined(CheckpointId(2), SOURCES[0], "disk full"))
    (end,) = driving.of_type(attempt_facts.EndAttempt)
    assert isinstance(end.error, errors.CheckpointError)
    assert driving.loop.unanswered == (STOP,)


def test_a_global_commit_is_told_to_every_slot_and_its_failure_ends_the_attempt() -> None:
    driving = Driving()
    driving.run()
    driving.on(attempt_facts.GlobalCommitEnded(ATTEMPT, "out", "sink", CheckpointId(1)))
    assert messages.GloballyCommitted("sink", CheckpointId(1)) in driving.decisions
    driving.on(
        attempt_facts.GlobalCommitEnded(
            ATTEMPT, "out", "sink", CheckpointId(1), errors.CommitFailed("away")
        )
    )
    assert driving.error == "away"


def test_a_split_that_appears_is_offered_once_and_a_checkpoint_follows() -> None:
    driving = Driving()
    driving.run()
    answer = attempt_facts.DiscoveryAnswered(ATTEMPT, "source", (Split("p0", b""),))
    driving.on(answer)
    (taken,) = driving.of_type(attempt_facts.TakeDiscovered)
    assert [split.id for offer in taken.offers.values() for split in offer.splits] == ["p0"]
    assert driving.triggered == [2]
    driving.on(answer)
    assert not driving.of_type(attempt_facts.TakeDiscovered)[1].offers
    driving.on(attempt_facts.DiscoveryAnswered(ATTEMPT, "source", error=errors.SourceError("gone")))
    assert driving.error == "gone"


# --- the end ----------------------------------------------------------------------------------


def _stop(driving: Driving) -> None:
    driving.run()
    driving.on(STOP)
    driving.ack_all(2)
    driving.end_append()
    driving.commit_all(2)


def test_a_job_that_stops_waits_for_its_slots_to_close_and_hears_late_acks() -> None:
    driving = Driving()
    _stop(driving)
    assert driving.of_type(messages.Shutdown) == [messages.Shutdown("job ledger is done")]
    late = messages.Acked(CheckpointId(1), snapshot(SOURCES[0]))
    driving.say(late)
    assert late in driving.decisions
    driving.say(messages.Failed(0, "BadRecord", "row 7", "", "never"))
    driving.say(messages.SlotClosed(), 0)
    driving.on(
        attempt_facts.SlotGone(0, ATTEMPT, "ended"), attempt_facts.SlotGone(1, OLDER, "ended")
    )
    assert not driving.is_over
    driving.on(attempt_facts.SlotGone(1, ATTEMPT, "ended"))
    assert driving.of_type(attempt_facts.ReleaseSlot) == [
        attempt_facts.ReleaseSlot(0),
        attempt_facts.ReleaseSlot(1),
    ]
    assert driving.decisions[-1] == attempt_facts.CloseAttempt(is_finished=False)


def test_slots_that_do_not_close_are_not_waited_for_longer_than_their_time() -> None:
    driving = Driving()
    _stop(driving)
    assert driving.loop.wait_s(driving.now_s) == SETTINGS.cancel_timeout_s
    driving.tick(SETTINGS.cancel_timeout_s - 0.1)
    assert not driving.is_over
    driving.tick(0.1)
    assert driving.decisions[-1] == attempt_facts.CloseAttempt(is_finished=False)
    driving = Driving()
    _stop(driving)
    driving.on(attempt_facts.SlotsEnded(ATTEMPT, errors.SlotLost("all have returned")))
    assert driving.decisions[-1] == attempt_facts.CloseAttempt(is_finished=False)


# --- requests ---------------------------------------------------------------------------------


def _join_all(driving: Driving) -> None:
    driving.join(0, 1)


def _start(driving: Driving) -> None:
    driving.join(0, 1)
    driving.recover()


def _collect(driving: Driving) -> None:
    driving.run()
    driving.on(MANUAL)


def _append(driving: Driving) -> None:
    _collect(driving)
    driving.ack_all(2)


def _write(driving: Driving) -> None:
    driving.run()
    driving.on(decisions.SavepointRequest("first", decisions.CheckpointKind.SAVEPOINT))
    driving.ack_all(2)


def _investigate(driving: Driving) -> None:
    driving.run()
    driving.say(CHANNEL_BROKE, 1)


def _fail(driving: Driving) -> None:
    driving.run()
    driving.on(attempt_facts.SlotsEnded(ATTEMPT, errors.SlotLost("gone")))


MOMENTS: tuple[Callable[[Driving], None], ...] = (
    lambda _: None,
    lambda driving: driving.join(0),
    _join_all,
    _start,
    Driving.run,
    _collect,
    _append,
    _write,
    _investigate,
    _stop,
    _fail,
)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("request_", [MANUAL, STOP, SAVEPOINT, STOP_SAVEPOINT, CANCEL])
def test_a_request_at_every_moment_of_an_attempt_is_taken_up_or_left_to_the_next(
    moment: Callable[[Driving], None], request_: attempt_facts.Request
) -> None:
    driving = Driving()
    moment(driving)
    ended = driving.is_over or moment in (_investigate, _stop)
    driving.on(request_)
    driving.on(attempt_facts.SlotsEnded(ATTEMPT, errors.SlotLost("gone")))
    driving.tick(60.0)
    assert driving.is_over
    began = [*driving.of_type(decisions.SavepointRequest)]
    match request_:
        case attempt_facts.CancelRequested() if not ended:
            (end,) = driving.of_type(attempt_facts.EndAttempt)
            assert isinstance(end.error, attempt_facts.JobCancelled)
        case decisions.SavepointRequest() if request_ in began:
            # Whoever has begun it answers when the attempt ends: it is not asked for twice.
            assert request_ not in driving.loop.unanswered
        case _:
            assert driving.loop.unanswered.count(request_) == 1


def test_what_was_asked_for_before_every_slot_runs_is_done_once_they_do() -> None:
    driving = Driving(checkpoints=CheckpointSettings(interval_s=None, max_concurrent=2))
    driving.on(MANUAL, SAVEPOINT)
    driving.run()
    assert len(driving.triggered) == 2
    assert driving.of_type(decisions.SavepointRequest) == [SAVEPOINT]


def test_a_savepoint_is_answered_once_whether_it_is_written_or_not() -> None:
    driving = Driving()
    driving.run()
    driving.on(SAVEPOINT)
    driving.ack_all(2)
    driving.finish_savepoint()
    driving.finish_savepoint()
    assert len(driving.of_type(attempt_facts.SavepointWritten)) == 1
    assert not driving.of_type(decisions.AbortSavepoint)
    driving = Driving()
    driving.run()
    driving.on(SAVEPOINT)
    driving.ack_all(2)
    driving.finish_savepoint("no space")
    assert not driving.of_type(attempt_facts.SavepointWritten)
    assert [abort.request for abort in driving.of_type(decisions.AbortSavepoint)] == [SAVEPOINT]


def test_a_savepoint_that_has_waited_too_long_is_not_begun_and_holds_nobody_up() -> None:
    driving = Driving()
    driving.stands = False
    driving.on(SAVEPOINT, MANUAL)
    driving.run()
    assert [trigger.kind for trigger in driving.of_type(decisions.Barrier)] == [
        decisions.CheckpointKind.MANUAL
    ]
    assert driving.loop.unanswered == (MANUAL,)
