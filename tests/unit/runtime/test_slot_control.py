"""Tests the reports of a slot to its driver."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.runtime.slot_parts import slot_context

from onceflow.core.errors import BadRecord
from onceflow.core.protocol import messages
from onceflow.core.protocol.checkpoints.snapshots import SubtaskSnapshot
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.loops.attempt_facts import SlotMessageReceived
from onceflow.core.runtime.slot.control import ControlMail, SlotControl
from onceflow.core.runtime.transport import control_plane
from onceflow.core.runtime.transport.data_plane import DataServer, SlotIdentity

HELLO = messages.Hello(AttemptId(1), 0, 1, 1, "here", "nowhere", {})


class Driver:
    """Hears a slot that runs no chains, and speaks to it."""

    def __init__(self, directory: Path) -> None:
        self._events: queue.SimpleQueue[control_plane.ControlEvent] = queue.SimpleQueue()
        self.mailbox: queue.SimpleQueue[ControlMail] = queue.SimpleQueue()
        context = slot_context(directory, self.mailbox.put)
        self.server = control_plane.ControlServer(
            "127.0.0.1", context.credentials, self._events.put
        )
        data = DataServer(
            "127.0.0.1", context.credentials, SlotIdentity("ledger", 1, 0), lambda _: None, 5.0
        )
        self.control = SlotControl(context, self.mailbox, data, self.server.address, HELLO)
        threading.Thread(target=self.control.run, daemon=True).start()
        connected = self._events.get(timeout=60)
        assert isinstance(connected, control_plane.SlotConnected)
        self.link: control_plane.SlotLink = connected.link

    def hears(self) -> messages.SlotMessage:
        """Return what the slot says next, heartbeats left out."""
        while True:
            event = self._events.get(timeout=60)
            if isinstance(event, SlotMessageReceived) and not isinstance(
                event.message, messages.Heartbeat
            ):
                return event.message


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    driver.link.send(messages.Shutdown("over"))
    assert driver.control.ended.result(timeout=60) == "over"
    assert driver.hears() == messages.SlotClosed()
    driver.server.close(5.0)


def test_a_report_that_cannot_be_spelled_is_a_failure_and_not_silence(driver: Driver) -> None:
    driver.mailbox.put(
        messages.Acked(CheckpointId(1), SubtaskSnapshot(SubtaskRef("\ud83d", 0), ()))
    )
    failed = driver.hears()
    assert isinstance(failed, messages.Failed)
    assert failed.error_class == "UnicodeEncodeError"


def test_only_the_first_failure_is_told_and_other_reports_go_on(driver: Driver) -> None:
    declined = messages.Declined(CheckpointId(1), SubtaskRef("balance", 0), "disk full")
    for report in (
        messages.PartFailed(BadRecord("row 7")),
        messages.PartFailed(BadRecord("row 8")),
        declined,
    ):
        driver.mailbox.put(report)
    failed = driver.hears()
    assert isinstance(failed, messages.Failed)
    assert failed.message == "row 7"
    assert driver.hears() == declined


def test_what_is_reported_before_the_end_is_told_before_it(driver: Driver) -> None:
    """The files of a late ack are deleted by the driver, which must hear of it (I9)."""
    ack = messages.Acked(CheckpointId(1), SubtaskSnapshot(SubtaskRef("balance", 0), ()))
    driver.mailbox.put(messages.Shutdown("over"))
    driver.mailbox.put(ack)
    assert driver.hears() == ack
