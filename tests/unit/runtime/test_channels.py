"""Channels keep order, are bounded by credits, and hold back what is blocked."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from onceflow.core.errors import BadRecord, SlotLost
from onceflow.core.protocol.checkpoints.alignment import EndOfStream
from onceflow.core.protocol.checkpoints.decisions import Barrier, CheckpointKind
from onceflow.core.protocol.checkpoints.in_flight import REPLAYED, Announced, ChannelEnd, Received
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.messages import Shutdown
from onceflow.core.runtime.dataflow.channels import (
    Batch,
    CollectedChannel,
    Element,
    InputGate,
    LocalChannel,
    decode_batches,
    encode_batches,
    join_batches,
)
from onceflow.core.runtime.dataflow.partitioners import KeyGroupPartitioner

ROWS = pa.record_batch([pa.array([1, 2])], names=["x"])
BARRIER = Barrier(CheckpointId(1), CheckpointKind.PERIODIC, 0)
OVERTAKES = Barrier(CheckpointId(1), CheckpointKind.PERIODIC, 0, overtakes_after_s=0)
BATCHES = [Batch(pa.record_batch([pa.array([number])], names=["x"])) for number in range(9)]


def batch_of(number: int) -> Batch:
    return BATCHES[number]


def opened(channels: int, credit_count: int) -> tuple[InputGate, list[LocalChannel]]:
    gate = InputGate([ChannelEnd()] * channels, credit_count, {})
    ends = [LocalChannel(gate, number) for number in range(channels)]
    gate.open()
    return gate, ends


def test_a_channel_delivers_in_the_order_sent() -> None:
    gate, (channel,) = opened(1, 8)
    sent: list[Element] = [Batch(ROWS), BARRIER, Batch(ROWS), EndOfStream()]
    for element in sent:
        channel.send(element)
    assert [gate.take(0) for _ in sent] == [Received(0, element) for element in sent]


def test_a_blocked_channel_keeps_its_elements_until_unblocked() -> None:
    gate, (left, right) = opened(2, 8)
    gate.block(0)
    left.send(BARRIER)
    right.send(EndOfStream())
    assert gate.take(0) == Received(1, EndOfStream())
    assert gate.take(0) is None
    gate.unblock([0])
    assert gate.take(0) == Received(0, BARRIER)


def test_mail_overtakes_elements() -> None:
    gate, (channel,) = opened(1, 1)
    channel.send(Batch(ROWS))
    gate.post(Shutdown("over"))
    assert gate.take(0) == Shutdown("over")


def test_a_sender_is_told_that_a_batch_waits_for_credit_and_when_there_is_some() -> None:
    sender = InputGate((), 0, {})
    reader, (channel,) = opened(1, 1)
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
    sender = InputGate((), 0, {})
    _, (channel,) = opened(1, 0)
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
    gate, (left, right) = opened(2, 2)
    left.send(batch_of(0))
    left.send(batch_of(1))
    assert left.send(batch_of(2))
    assert left.overtake(OVERTAKES) == (batch_of(2),)
    assert gate.take(0) == Announced(0, OVERTAKES)
    gate.record(CheckpointId(1), ())
    right.send(batch_of(3))
    taken = [gate.take(0) for _ in range(2)]
    assert {item.channel for item in taken if isinstance(item, Received)} == {0, 1}
    assert Received(0, batch_of(0)) in taken, "the stream goes on meanwhile"
    right.overtake(OVERTAKES)
    assert gate.take(0) == Announced(1, OVERTAKES)
    assert gate.end_recording(CheckpointId(1)) == {0: tuple(map(batch_of, (0, 1, 3)))}
    assert not left.flush()
    assert [gate.take(0) for _ in range(3)] == [
        Received(0, batch_of(1)),
        Received(0, batch_of(2)),
        None,
    ]


def test_senders_make_nothing_before_the_reader_has_taken_all_that_it_replays() -> None:
    gate = InputGate([ChannelEnd()] * 2, 1, {})
    sender, channel = InputGate((), 0, {}), LocalChannel(gate, 0)
    channel.attach(sender.wake)
    gate.replay([batch_of(0)], 0)
    gate.open()
    assert channel.flush(), "rows that it made now would be in flight besides those replayed"
    assert channel.overtake(OVERTAKES) == ()
    assert gate.take(0) == Announced(0, OVERTAKES)
    assert gate.take(0) == Received(REPLAYED, batch_of(0))
    gate.open()
    late = LocalChannel(gate, 1)
    assert sender.take(60) is None, "the credits have woken it"
    for one in (channel, late):
        assert not one.flush()
        assert [one.send(batch_of(1)), one.send(batch_of(2))] == [False, True]


def test_rows_in_flight_are_read_back_as_they_were_written() -> None:
    with_metadata = Batch(ROWS.replace_schema_metadata({"from": "elsewhere"}))
    read = decode_batches(encode_batches([Batch(ROWS), with_metadata]).to_pybytes())
    assert read == [ROWS, ROWS]


def numbered_hashes(batches: Sequence[Batch]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for batch in batches:
        assert batch.hashes is not None
        found += zip(batch.rows["n"].to_pylist(), batch.hashes.tolist(), strict=True)
    return found


def test_parts_of_batches_are_joined_in_order_to_none_larger_than_there_were() -> None:
    rows = pa.record_batch([[f"k{number % 7}" for number in range(60)], range(60)], ["key", "n"])
    channels = [CollectedChannel() for _ in range(3)]
    edge = KeyGroupPartitioner(("key",), 128, channels, rows.schema)
    for first in range(0, 60, 6):
        edge.receive(Batch(rows.slice(first, 6)))
    parts = max((channel.batches for channel in channels), key=len)
    whole = join_batches(parts, rows_max=6)
    assert len(parts) == 10
    assert len(whole) < 10
    assert all(batch.rows.num_rows <= 6 for batch in whole)
    for one, other in itertools.pairwise(whole):
        assert one.rows.num_rows + other.rows.num_rows > 6
    assert numbered_hashes(whole) == numbered_hashes(parts)
    assert join_batches([], 6) == []


def test_a_record_whose_key_is_null_is_told_by_column_and_record() -> None:
    rows = pa.record_batch([["a", None], [1, 2]], names=["account", "amount"])
    edge = KeyGroupPartitioner(("account",), 128, [CollectedChannel()], rows.schema)
    with pytest.raises(BadRecord, match=r"key_by\('account'\).*null.*'amount': 2"):
        edge.receive(Batch(rows))


def test_a_record_whose_key_is_null_is_told_though_python_has_not_its_date() -> None:
    day = pa.array([6_000_000], pa.int32()).cast(pa.date32())
    rows = pa.record_batch([pa.array([None], pa.string()), day], names=["account", "day"])
    edge = KeyGroupPartitioner(("account",), 128, [CollectedChannel()], rows.schema)
    with pytest.raises(BadRecord, match=r"key_by\('account'\).*null.*'day': 18397-06-11"):
        edge.receive(Batch(rows))


def test_a_watermark_keeps_its_place_among_the_rows() -> None:
    gate, channels = opened(1, 9)
    schema = pa.schema([("account", pa.string())])
    edge = KeyGroupPartitioner(("account",), 128, channels, schema)
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


# --- waiting --------------------------------------------------------------------------------------


def _give_later(give: Callable[[], None]) -> None:
    """Call `give` when the caller has begun to wait."""
    threading.Timer(0.05, give).start()


@pytest.mark.parametrize("what", ["mail", "element", "wake-up"])
def test_a_reader_that_waits_is_woken_by_what_comes(what: str) -> None:
    gate, (channel,) = opened(1, 8)
    began = time.monotonic()
    match what:
        case "mail":
            _give_later(lambda: gate.post(Shutdown("over")))
            assert gate.take(60) == Shutdown("over")
        case "element":
            _give_later(lambda: gate.put(0, Batch(ROWS)))
            assert gate.take(60) == Received(0, Batch(ROWS))
        case _:
            _give_later(gate.wake)
            assert gate.take(60) is None
    assert time.monotonic() - began < 30
    del channel


def test_a_wake_up_ends_one_wait_alone() -> None:
    gate, _ = opened(1, 8)
    gate.wake()
    began = time.monotonic()
    assert gate.take(60) is None
    woken_s = time.monotonic()
    assert gate.take(0.1) is None
    assert woken_s - began < 30
    assert time.monotonic() - woken_s >= 0.09


def test_mail_can_be_taken_without_waiting() -> None:
    gate, _ = opened(1, 8)
    assert gate.take_mail() is None
    gate.post(Shutdown("first"))
    gate.post(Shutdown("second"))
    assert [gate.take_mail(), gate.take_mail()] == [Shutdown("first"), Shutdown("second")]


def test_a_batch_that_is_taken_makes_room_for_one_more() -> None:
    gate, (channel,) = opened(1, 2)
    assert [channel.send(batch_of(number)) for number in range(4)] == [False, False, True, True]
    assert gate.waiting() == 2
    gate.take(0)
    assert channel.flush()
    assert gate.waiting() == 2
    # A barrier uses no credit and gives none.
    channel.send(BARRIER)
    for number in (1, 2, 3):
        assert gate.take(0) == Received(0, batch_of(number))
        channel.flush()
    assert gate.take(0) == Received(0, BARRIER)
    assert [channel.send(batch_of(number)) for number in range(3)] == [False, False, True]


def test_a_barrier_pushes_rows_through_and_they_borrow_credits() -> None:
    gate, (channel,) = opened(1, 2)

    def take() -> Any:
        return gate.take(0, elements=False, up_to_barriers=True)

    batches = [batch_of(number) for number in range(3)]
    assert [channel.send(batch) for batch in batches] == [False, False, True]
    assert take() is None, "no barrier waits"
    assert channel.push(BARRIER)
    expected = [Received(0, element) for element in (*batches, BARRIER)]
    assert [take() for _ in range(5)] == [*expected, None]
    # The reader still has no room, so a later barrier finds no further rows.
    assert channel.flush()
    later = replace(BARRIER, checkpoint=CheckpointId(BARRIER.checkpoint + 1))
    assert channel.push(later)
    assert [take(), take()] == [Received(0, later), None]
    assert gate.take(0) is None
    assert not channel.flush()
    assert [channel.send(batch) for batch in batches] == [False, False, True]


def test_a_closed_channel_takes_nothing() -> None:
    gate, (channel,) = opened(1, 8)
    channel.close("the slot is lost")
    channel.close("later")
    for send in (lambda: channel.send(BARRIER), channel.flush, lambda: channel.overtake(OVERTAKES)):
        with pytest.raises(SlotLost, match="the slot is lost"):
            send()
    assert gate.take(0) is None
    collected = CollectedChannel()
    collected.close("over")
    with pytest.raises(SlotLost, match="over"):
        collected.send(Batch(ROWS))


def test_a_single_batch_in_flight_is_read_back() -> None:
    (rows,) = decode_batches(encode_batches([Batch(ROWS)]).to_pybytes())
    assert rows == ROWS


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_barrier_of_a_forgotten_checkpoint_is_an_element_again(is_forgotten: bool) -> None:
    gate = InputGate([ChannelEnd(keeps_order=False)] * 2, 8, {})
    channels = [LocalChannel(gate, number) for number in range(2)]
    gate.open()
    gate.record(CheckpointId(1), [0])
    if is_forgotten:
        gate.forget(CheckpointId(1))
    channels[1].send(BARRIER)
    assert gate.take(0) == (Received(1, BARRIER) if is_forgotten else None)


def test_an_overtaken_end_is_in_flight_on_the_input_without_overtaken_rows() -> None:
    """Two streams are united into input 0, and end behind rows; the end of input 1 is alone."""
    other = pa.schema([("y", pa.string())])
    ends = [ChannelEnd(0), ChannelEnd(0), ChannelEnd(1)]
    gate = InputGate(ends, 8, {0: ROWS.schema, 1: other})
    gate.put(0, Batch(ROWS))
    for channel in range(3):
        gate.put(channel, EndOfStream())
        gate.put(channel, OVERTAKES)
    gate.record(CheckpointId(1), passed=[])
    overtaken = gate.end_recording(CheckpointId(1))
    assert overtaken[0] == (Batch(ROWS),)
    (end,) = overtaken[1]
    assert (end.rows.schema, end.rows.num_rows) == (other, 0)
    assert set(overtaken) == {0, 1}
    assert [rows.num_rows for rows in decode_batches(encode_batches([end]).to_pybytes())] == [0]
