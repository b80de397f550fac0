"""Channels between processes, over a real Flight server on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from onceflow.core.errors import SlotLost
from onceflow.core.protocol.alignment import Barrier
from onceflow.core.protocol.decisions import CheckpointKind
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.runtime.channels import InputGate
from onceflow.core.runtime.data_plane import DataServer, FlightChannel
from onceflow.core.runtime.elements import Batch, Element, EndOfStream, Received

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


def batch(first: int, count: int) -> Batch:
    ids = list(range(first, first + count))
    rows = pa.record_batch([ids, [f"n{i}" for i in ids]], schema=SCHEMA)
    return Batch(rows, np.arange(first, first + count, dtype=np.uint64))


class Receiver:
    def __init__(self) -> None:
        self.losses: list[str] = []
        self.gate = InputGate(2)
        self.server = DataServer("127.0.0.1", "secret", 7, self.losses.append, 5.0)
        self.client = flight.FlightClient(f"grpc://127.0.0.1:{self.server.port}")

    def channel(
        self, *, token: str = "secret", attempt: int = 7, credits_count: int = 4
    ) -> FlightChannel:
        return FlightChannel(
            self.client,
            token,
            chain="balance",
            attempt=attempt,
            source=1,
            target=0,
            schema=SCHEMA,
            credits_count=credits_count,
        )

    def take(self) -> Element:
        item = self.gate.take(5.0)
        assert isinstance(item, Received)
        assert item.channel == 1
        return item.element


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    receiver.server.serve_gates({"balance": receiver.gate})
    yield receiver
    receiver.server.close()


def test_batches_barriers_and_the_end_arrive_whole_and_in_order(receiver: Receiver) -> None:
    channel = receiver.channel()
    barrier = Barrier(CheckpointId(3), CheckpointKind.FINAL, 123)
    first, second = batch(0, 5), batch(5, 3)
    for element in (first, barrier, second, EndOfStream(), barrier):
        channel.send(element)
    got = receiver.take()
    assert isinstance(got, Batch)
    assert got.rows.equals(first.rows)
    assert got.hashes is not None
    assert got.hashes.tolist() == [0, 1, 2, 3, 4]
    assert receiver.take() == barrier
    got = receiver.take()
    assert isinstance(got, Batch)
    assert got.rows.equals(second.rows)
    assert receiver.take() == EndOfStream()
    assert receiver.take() == barrier
    channel.close("done")


def test_no_more_batches_are_under_way_than_there_are_credits(receiver: Receiver) -> None:
    channel = receiver.channel(credits_count=2)
    sent = 0

    def send() -> None:
        nonlocal sent
        for number in range(6):
            channel.send(batch(number, 1))
            sent += 1

    sender = threading.Thread(target=send)
    sender.start()
    deadline = time.monotonic() + 5
    while receiver.gate.waiting() < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    sender.join(0.1)
    assert (sent, receiver.gate.waiting()) == (2, 2)
    for _ in range(6):
        receiver.take()
    sender.join(5)
    assert sent == 6
    channel.close("done")


def test_a_stream_closed_in_good_order_is_no_loss(receiver: Receiver) -> None:
    channel = receiver.channel()
    channel.send(EndOfStream())
    channel.close("done")
    receiver.take()
    receiver.client.close()
    time.sleep(0.05)
    assert receiver.losses == []


def test_many_channels_are_opened_and_closed_without_an_abort(receiver: Receiver) -> None:
    """Two threads that end one stream abort the process; so does credit for one that is gone."""
    before = threading.active_count()
    for number in range(1000):
        channel = receiver.channel()
        channel.send(batch(number, 1))
        channel.close("done")
        assert isinstance(receiver.take(), Batch)
    deadline = time.monotonic() + 10
    while threading.active_count() > before + 1:
        assert time.monotonic() < deadline, "threads of closed channels go on"
        time.sleep(0.01)
    assert receiver.losses == []


def test_a_sender_that_vanishes_is_reported_as_lost(receiver: Receiver) -> None:
    channel = receiver.channel()
    channel.send(batch(0, 1))
    receiver.take()
    cast("Any", channel)._reader.cancel()  # as a killed process would
    deadline = time.monotonic() + 5
    while not receiver.losses and time.monotonic() < deadline:
        time.sleep(0.005)
    assert "slot 1 is lost: its channel to balance" in receiver.losses[0]
    with pytest.raises(SlotLost):
        for _ in range(100):
            channel.send(batch(0, 1))
            time.sleep(0.005)


@pytest.mark.parametrize(("token", "attempt"), [("guess", 7), ("secret", 6)])
def test_a_call_without_the_token_or_of_another_attempt_is_refused(
    receiver: Receiver, token: str, attempt: int
) -> None:
    with pytest.raises(SlotLost):
        channel = receiver.channel(token=token, attempt=attempt)
        for _ in range(100):
            channel.send(batch(0, 1))
            time.sleep(0.005)
    assert receiver.gate.waiting() == 0
