"""Channels keep order, are bounded by credits, and hold back what is blocked."""

from __future__ import annotations

import threading
import time

import pyarrow as pa
import pytest

from onceflow.core.errors import SlotLost
from onceflow.core.protocol.alignment import Barrier
from onceflow.core.protocol.decisions import CheckpointKind
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.runtime.dataflow.channels import (
    Batch,
    Credits,
    Element,
    EndOfStream,
    InputGate,
    LocalChannel,
    Received,
)
from onceflow.core.runtime.messages import Shutdown

ROWS = pa.record_batch([pa.array([1, 2])], names=["x"])
BARRIER = Barrier(CheckpointId(1), CheckpointKind.PERIODIC, 0)


def test_a_channel_delivers_in_the_order_sent() -> None:
    gate = InputGate(1)
    channel = LocalChannel(gate, 0, credits_count=8)
    sent: list[Element] = [Batch(ROWS), BARRIER, Batch(ROWS), EndOfStream()]
    for element in sent:
        channel.send(element)
    assert [gate.take(0) for _ in sent] == [Received(0, element) for element in sent]


def test_a_blocked_channel_keeps_its_elements_until_unblocked() -> None:
    gate = InputGate(2)
    left, right = (LocalChannel(gate, number, credits_count=8) for number in range(2))
    gate.block(0)
    left.send(BARRIER)
    right.send(EndOfStream())
    assert gate.take(0) == Received(1, EndOfStream())
    assert gate.take(0) is None
    gate.unblock([0])
    assert gate.take(0) == Received(0, BARRIER)


def test_mail_overtakes_elements() -> None:
    gate = InputGate(1)
    LocalChannel(gate, 0, credits_count=1).send(Batch(ROWS))
    gate.post(Shutdown("over"))
    assert gate.take(0) == Shutdown("over")


def test_a_sender_without_credit_waits_until_the_reader_takes_and_barriers_need_none() -> None:
    gate = InputGate(1)
    channel = LocalChannel(gate, 0, credits_count=1)
    channel.send(Batch(ROWS))
    channel.send(BARRIER)
    passed = threading.Event()

    def send_more() -> None:
        channel.send(Batch(ROWS))
        passed.set()

    sender = threading.Thread(target=send_more)
    sender.start()
    assert not passed.wait(0.05)
    gate.take(0)
    assert passed.wait(5)
    sender.join()
    assert channel.waited_s > 0.04


def test_closing_wakes_a_waiting_sender_with_the_reason() -> None:
    grants = Credits(0)
    errors: list[str] = []

    def wait() -> None:
        try:
            grants.acquire()
        except SlotLost as error:
            errors.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.01)
    grants.close("the attempt is over")
    waiter.join(5)
    assert errors == ["the attempt is over"]
    with pytest.raises(SlotLost, match="the attempt is over"):
        grants.acquire()
