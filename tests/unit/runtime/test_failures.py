"""An attempt that fails says what happened, and not only who noticed it first."""

from __future__ import annotations

import queue
import threading

from onceflow.core.errors import BadRecord, ConfigError, SlotFailed, SlotLost
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.runtime.cluster.spark import stage_error
from onceflow.core.runtime.driver.attempt_context import AttemptEvent, CancelRequested
from onceflow.core.runtime.driver.slot_pool import (
    cause_of,
    slot_error,
)
from onceflow.core.runtime.messages import fingerprint_of, report_of_failure
from onceflow.core.runtime.transport.control_plane import SlotGone

_ATTEMPT = AttemptId(3)
_CHANNEL = SlotLost("channel balance[0] from 1 broke")


def test_the_lost_slot_is_named_before_the_channel_that_broke_with_it() -> None:
    events: queue.SimpleQueue[AttemptEvent] = queue.SimpleQueue()
    events.put(SlotGone(0, AttemptId(_ATTEMPT - 1), "of an older attempt"))
    events.put(SlotGone(1, _ATTEMPT, "its process has ended"))
    late = threading.Timer(0.05, events.put, [SlotGone(0, _ATTEMPT, "its process has ended")])
    late.start()
    error = cause_of(report_of_failure(1, _CHANNEL), _ATTEMPT, events)
    late.join()
    assert isinstance(error, SlotLost)
    assert str(error).startswith("slot 0 is lost: its process has ended")
    assert "slot 1: channel balance[0] from 1 broke" in str(error)


def test_a_channel_that_broke_with_no_slot_lost_is_the_cause_itself() -> None:
    error = cause_of(report_of_failure(1, _CHANNEL), _ATTEMPT, queue.SimpleQueue())
    assert str(error) == "slot 1: channel balance[0] from 1 broke"


def test_an_error_of_its_own_is_told_at_once_and_nothing_is_taken() -> None:
    events: queue.SimpleQueue[AttemptEvent] = queue.SimpleQueue()
    events.put(SlotGone(0, _ATTEMPT, "its process has ended"))
    error = cause_of(report_of_failure(1, BadRecord("row 7")), _ATTEMPT, events)
    assert isinstance(error, BadRecord)
    assert str(error) == "slot 1: row 7"
    assert events.qsize() == 1


def test_what_the_user_asks_for_meanwhile_stays_asked() -> None:
    events: queue.SimpleQueue[AttemptEvent] = queue.SimpleQueue()
    events.put(CancelRequested())
    cause_of(report_of_failure(1, _CHANNEL), _ATTEMPT, events)
    assert events.get_nowait() == CancelRequested()
    assert events.empty()


def test_an_unknown_error_is_told_by_its_name_and_counts_if_it_is_a_mistake() -> None:
    for error, counts in ((KeyError("id"), False), (TypeError("no such argument"), True)):
        told = slot_error(report_of_failure(1, error))
        assert isinstance(told, SlotFailed)
        assert str(told).startswith(f"slot 1: {type(error).__name__}: ")
        assert bool(told.fingerprint) == counts
        assert fingerprint_of(told) == told.fingerprint


def test_what_a_slot_could_not_start_for_is_told_as_the_mistake_that_it_is() -> None:
    spark = "Job aborted\nTraceback (most recent call last):\n  File ...\n"
    told = stage_error(RuntimeError(f"{spark}onceflow.core.errors.ConfigError: no such file\n\tat"))
    assert isinstance(told, ConfigError)
    assert str(told) == "no such file"
    told = stage_error(RuntimeError(f"{spark}ModuleNotFoundError: No module named 'onceflow'\n"))
    assert isinstance(told, ConfigError)
    assert "'onceflow'" in str(told)
    assert "--py-files" in str(told)
