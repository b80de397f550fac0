"""Channels keep order, are bounded by credits, and hold back what is blocked."""

from __future__ import annotations

import threading
import time

import pyarrow as pa
import pytest

from onceflow.core.errors import BadRecord, SlotLost
from onceflow.core.protocol.alignment import Barrier, EndOfStream
from onceflow.core.protocol.decisions import CheckpointKind
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.in_flight import REPLAYED, Announced, ChannelEnd, Received
from onceflow.core.runtime.dataflow.channels import (
    Batch,
    CollectedChannel,
    Element,
    InputGate,
    LocalChannel,
    decode_batches,
    encode_batches,
)
from onceflow.core.runtime.dataflow.partitioners import KeyGroupPartitioner
from onceflow.core.runtime.messages import Shutdown

ROWS = pa.record_batch([pa.array([1, 2])], names=["x"])
BARRIER = Barrier(CheckpointId(1), CheckpointKind.PERIODIC, 0)
OVERTAKES = Barrier(CheckpointId(1), CheckpointKind.PERIODIC, 0, overtakes_after_s=0)
BATCHES = [Batch(pa.record_batch([pa.array([number])], names=["x"])) for number in range(9)]


def batch_of(number: int) -> Batch:
    return BATCHES[number]


def test_a_channel_delivers_in_the_order_sent() -> None:
    gate = InputGate([ChannelEnd()] * 1)
    channel = LocalChannel(gate, 0, credit_count=8)
    sent: list[Element] = [Batch(ROWS), BARRIER, Batch(ROWS), EndOfStream()]
    for element in sent:
        channel.send(element)
    assert [gate.take(0) for _ in sent] == [Received(0, element) for element in sent]


def test_a_blocked_channel_keeps_its_elements_until_unblocked() -> None:
    gate = InputGate([ChannelEnd()] * 2)
    left, right = (LocalChannel(gate, number, credit_count=8) for number in range(2))
    gate.block(0)
    left.send(BARRIER)
    right.send(EndOfStream())
    assert gate.take(0) == Received(1, EndOfStream())
    assert gate.take(0) is None
    gate.unblock([0])
    assert gate.take(0) == Received(0, BARRIER)


def test_mail_overtakes_elements() -> None:
    gate = InputGate([ChannelEnd()] * 1)
    LocalChannel(gate, 0, credit_count=1).send(Batch(ROWS))
    gate.post(Shutdown("over"))
    assert gate.take(0) == Shutdown("over")


def test_a_sender_is_told_that_a_batch_waits_for_credit_and_when_there_is_some() -> None:
    sender, reader = InputGate(()), InputGate([ChannelEnd()] * 1)
    channel = LocalChannel(reader, 0, credit_count=1)
    channel.attach(sender.wake)
    assert not channel.send(Batch(ROWS))
    assert channel.send(Batch(ROWS))
    assert channel.send(BARRIER), "it stays behind the rows before it"
    assert channel.flush()
    assert reader.take(0) == Received(0, Batch(ROWS))
    assert reader.take(0) is None
    began = time.monotonic()
    assert sender.take(60) is None
    assert time.monotonic() - began < 50, "the credit has woken it"
    assert not channel.flush()
    assert [reader.take(0) for _ in range(2)] == [Received(0, Batch(ROWS)), Received(0, BARRIER)]


def test_closing_wakes_a_waiting_sender_with_the_reason() -> None:
    sender = InputGate(())
    channel = LocalChannel(InputGate([ChannelEnd()] * 1), 0, credit_count=0)
    channel.attach(sender.wake)
    assert channel.send(Batch(ROWS))
    threading.Timer(0.01, lambda: channel.close("the attempt is over")).start()
    began = time.monotonic()
    sender.take(60)
    assert time.monotonic() - began < 50
    with pytest.raises(SlotLost, match="the attempt is over"):
        channel.flush()
    with pytest.raises(SlotLost, match="the attempt is over"):
        channel.send(Batch(ROWS))


def test_a_barrier_that_overtakes_goes_ahead_on_both_sides_and_all_that_it_overtakes_is_known() -> (
    None
):
    gate = InputGate([ChannelEnd()] * 2)
    left, right = (LocalChannel(gate, number, credit_count=1) for number in range(2))
    gate.replay([batch_of(0)], 0)
    left.send(batch_of(1))
    assert left.send(batch_of(2))
    assert left.overtake(OVERTAKES) == (batch_of(2),)
    assert gate.take(0) == Announced(0, OVERTAKES)
    gate.record(CheckpointId(1), ())
    right.send(batch_of(3))
    assert gate.take(0) == Received(REPLAYED, batch_of(0)), "the stream goes on meanwhile"
    right.overtake(OVERTAKES)
    assert gate.take(0) == Announced(1, OVERTAKES)
    assert gate.recorded(CheckpointId(1)) == {0: tuple(map(batch_of, (0, 1, 3)))}
    left.flush()
    taken = [gate.take(0) for _ in range(3)]
    assert {item.channel for item in taken if isinstance(item, Received)} == {0, 1}
    left.flush()
    assert gate.waiting() == 0 or gate.take(0) == Received(0, batch_of(2))


def test_rows_in_flight_are_read_back_as_they_were_written() -> None:
    with_metadata = Batch(ROWS.replace_schema_metadata({"from": "elsewhere"}))
    read = decode_batches(encode_batches([Batch(ROWS), with_metadata]).to_pybytes())
    assert read == [ROWS, ROWS]


def test_a_record_whose_key_is_null_is_told_by_column_and_record() -> None:
    rows = pa.record_batch([["a", None], [1, 2]], names=["account", "amount"])
    edge = KeyGroupPartitioner(("account",), 128, [CollectedChannel()], rows.schema)
    with pytest.raises(BadRecord, match=r"key_by\('account'\).*null.*'amount': 2"):
        edge.receive(Batch(rows))


def test_a_watermark_keeps_its_place_among_the_rows() -> None:
    gate = InputGate([ChannelEnd()] * 1)
    schema = pa.schema([("account", pa.string())])
    edge = KeyGroupPartitioner(("account",), 128, [LocalChannel(gate, 0, 9)], schema)
    rows = pa.record_batch([["a"]], schema=schema)
    edge.receive(Batch(rows))
    edge.tell(7)
    edge.receive(Batch(rows))
    seen: list[tuple[int, int | None]] = []
    for _ in range(3):
        taken = gate.take(0)
        assert isinstance(taken, Received)
        assert isinstance(taken.element, Batch)
        seen.append((taken.element.rows.num_rows, taken.element.watermark))
    assert seen == [(1, None), (0, 7), (1, None)]
