"""Channels between processes, over a real Flight server on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from onceflow.core.errors import SlotLost
from onceflow.core.protocol.checkpoints.alignment import EndOfStream
from onceflow.core.protocol.checkpoints.decisions import Barrier, CheckpointKind
from onceflow.core.protocol.checkpoints.in_flight import ChannelEnd, Received
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.runtime.dataflow.channels import Batch, Element, InputGate
from onceflow.core.runtime.transport.credentials import Credentials
from onceflow.core.runtime.transport.data_plane import (
    DataServer,
    FlightChannel,
    KeepAlive,
    SlotIdentity,
)
from onceflow.integration.faults.network import TcpProxy

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
OWN = SlotIdentity("ledger", 7, 0)


def batch(first: int, count: int) -> Batch:
    ids = list(range(first, first + count))
    rows = pa.record_batch([ids, [f"n{i}" for i in ids]], schema=SCHEMA)
    return Batch(rows, np.arange(first, first + count, dtype=np.uint64))


class Receiver:
    def __init__(
        self, network: Callable[[int], int] = lambda port: port, credit_count: int = 4
    ) -> None:
        self.losses: list[str] = []
        self.gate = InputGate([ChannelEnd()] * 2, credit_count, {})
        self.gate.open()
        self.server = DataServer("127.0.0.1", Credentials("secret"), OWN, self.losses.append, 5.0)
        self.client = flight.FlightClient(f"grpc://127.0.0.1:{network(self.server.port)}")

    def channel(self, *, token: str = "secret", target: SlotIdentity = OWN) -> FlightChannel:
        """Return a channel that has its credits."""
        channel = FlightChannel(
            self.client,
            Credentials(token),
            chain="balance",
            source=1,
            target=target,
            channel=1,
            schema=SCHEMA,
        )
        deadline = time.monotonic() + 90
        while channel.flush():
            assert time.monotonic() < deadline, "no credits have come"
            time.sleep(0.001)
        return channel

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
    receiver.server.close(5.0)


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
    channel = receiver.channel()
    credit = threading.Event()
    channel.attach(credit.set)
    assert [channel.send(batch(number, 1)) for number in range(8)] == [False] * 4 + [True] * 4
    deadline = time.monotonic() + 90
    while receiver.gate.waiting() < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert receiver.gate.waiting() == 4
    for number in range(8):
        got = receiver.take()
        assert isinstance(got, Batch)
        assert got.rows.column("id").to_pylist() == [number]
        while number < 4 and not credit.wait(0.05) and time.monotonic() < deadline:
            pass
        credit.clear()
        channel.flush()
    assert not channel.flush()
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
    deadline = time.monotonic() + 90
    while threading.active_count() > before + 1:
        assert time.monotonic() < deadline, "threads of closed channels go on"
        time.sleep(0.01)
    assert receiver.losses == []


def test_a_sender_that_vanishes_is_reported_as_lost(receiver: Receiver) -> None:
    channel = receiver.channel()
    channel.send(batch(0, 1))
    receiver.take()
    cast("Any", channel)._reader.cancel()  # as a killed process would
    deadline = time.monotonic() + 90
    while not receiver.losses and time.monotonic() < deadline:
        time.sleep(0.005)
    assert "slot 1 is lost: its channel to balance" in receiver.losses[0]
    with pytest.raises(SlotLost):
        for _ in range(100):
            channel.send(batch(0, 1))
            time.sleep(0.005)


def test_a_call_without_the_token_is_refused(receiver: Receiver) -> None:
    with pytest.raises(SlotLost):
        receiver.channel(token="guess")
    assert receiver.gate.waiting() == 0


@pytest.mark.parametrize("change", [{"job": "other"}, {"attempt": 6}, {"slot": 1}], ids=str)
def test_channel_for_another_job_attempt_or_slot_is_refused_with_both_and_the_way_out(
    receiver: Receiver, change: dict[str, Any]
) -> None:
    target = replace(OWN, **change)
    with pytest.raises(SlotLost) as caught:
        receiver.channel(target=target)
    assert f"a channel to {target} was connected to {OWN}" in str(caught.value)
    assert "RuntimeSettings(slot_host=…)" in str(caught.value)
    assert receiver.gate.waiting() == 0
    assert receiver.losses == [], "the slot that was reached has lost nothing"


@contextmanager
def network() -> Generator[tuple[Receiver, TcpProxy], None, None]:
    """A receiver and the network before it: what that holds is neither lost nor refused."""
    proxies: list[TcpProxy] = []

    def through(port: int) -> int:
        proxies.append(TcpProxy("127.0.0.1", port))
        return proxies[0].port

    receiver = Receiver(through, credit_count=1000)
    receiver.server.serve_gates({"balance": receiver.gate})
    try:
        yield receiver, proxies[0]
    finally:
        proxies[0].close()
        receiver.server.close(5.0)


@contextmanager
def kept_alive(channel: FlightChannel, lost: list[str]) -> Generator[KeepAlive, None, None]:
    keep_alive = KeepAlive([channel], lost.append, timeout_s=2.0, start_timeout_s=60.0)
    try:
        yield keep_alive
    finally:
        keep_alive.end()
        channel.close("the test is over")


def watch(keep_alive: KeepAlive, lost: list[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not lost and (now := time.monotonic()) < deadline:
        keep_alive.check(now)
        time.sleep(0.02)


def test_a_peer_that_is_cut_off_is_lost_by_name_although_its_connection_stands() -> None:
    lost: list[str] = []
    with network() as (receiver, proxy):
        channel = receiver.channel()
        with kept_alive(channel, lost) as keep_alive:
            watch(keep_alive, lost, 2.3)
            assert lost == []
            assert channel.answered
            proxy.pause()
            watch(keep_alive, lost, 60.0)
    assert len(lost) == 1
    assert lost[0].startswith("slot 0 is lost: channel balance[0] from 1 has had no answer for 2 s")


def test_a_slow_reader_is_no_lost_peer(receiver: Receiver) -> None:
    """Its operators take nothing, and no credit comes back; its transport answers."""
    lost: list[str] = []
    channel = receiver.channel()
    for number in range(4):
        channel.send(batch(number, 1))
    waits = threading.Thread(target=lambda: channel.send(batch(1, 1)))
    waits.start()
    with kept_alive(channel, lost) as keep_alive:
        watch(keep_alive, lost, 2.3)
        assert lost == []
        receiver.take()
        waits.join(60)
        assert not waits.is_alive()


def test_a_peer_that_takes_nothing_does_not_hold_up_the_close() -> None:
    with network() as (receiver, proxy):
        channel = receiver.channel()
        proxy.pause()
        ended = threading.Event()

        def send() -> None:
            with suppress(SlotLost):
                while True:
                    channel.send(batch(0, 50_000))
            ended.set()

        threading.Thread(target=send, daemon=True).start()
        assert not ended.wait(0.5)
        began = time.monotonic()
        channel.close("the attempt is over")
        assert time.monotonic() - began < 30.0
        proxy.refuse()
        assert ended.wait(60.0)
