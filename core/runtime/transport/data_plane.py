"""Channels between slots over Arrow Flight: one bidirectional stream per channel.

Downstream messages, by the first byte of their metadata:
    D   the message's record batch is data; its last column is the key hash. If there is a
        watermark, it follows as a little-endian i64
    B   a barrier, as msgpack
    E   end of stream: no more rows
    A   a question: is the peer alive?
    Z   the end mark: the sender has sent all data and closes
Upstream: each message's metadata is one little-endian u32, the number of credits; 0 answers A.

A stream that ends without Z means that the peer is lost. gRPC does not survive a fork, so both ends
are opened inside the slot's own process and never in the executor's daemon.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import flight

from onceflow.core.decoding import msgpack_decoder
from onceflow.core.errors import SettingsRefused, SlotLost
from onceflow.core.protocol.checkpoints.alignment import EndOfStream
from onceflow.core.protocol.checkpoints.decisions import Barrier
from onceflow.core.protocol.loops.slots import ADDRESS_ADVICE
from onceflow.core.runtime.dataflow.channels import (
    Batch,
    Element,
    InputGate,
    OutputChannel,
)
from onceflow.core.runtime.transport.addresses import to_location
from onceflow.core.runtime.transport.credentials import Credentials, metadata_of

HASH_COLUMN = "__onceflow_key_hash"
_CREDIT = struct.Struct("<I")
_WATERMARK = struct.Struct("<q")
_BARRIERS = msgpack_decoder(Barrier)
_DATA, _BARRIER, _END, _ASK, _CLOSE = b"D", b"B", b"E", b"A", b"Z"
CHANNEL_CLOSE_TIMEOUT_S = 1.0
"""The time in which a peer must take the message that closes a channel."""


@dataclass(frozen=True, slots=True)
class SlotIdentity:
    """The identity of a slot. The sender of each channel names its target by it."""

    job: str
    attempt: int
    slot: int

    def __str__(self) -> str:
        return f"slot {self.slot} of job {self.job!r}, attempt {self.attempt}"


class DataServer(flight.FlightServerBase):
    """Receives the channels that end in this slot and feeds them to their gates."""

    def __init__(
        self,
        host: str,
        credentials: Credentials,
        identity: SlotIdentity,
        on_lost: Callable[[str], None],
        timeout_s: float,
    ) -> None:
        location = to_location(credentials.scheme, host, 0)
        try:
            super().__init__(location, **credentials.of_server())
        except (pa.ArrowException, OSError) as error:
            raise SettingsRefused(
                f"{identity} cannot listen on its machine at {host} ({error}). {ADDRESS_ADVICE}"
            ) from error
        self.address = to_location(credentials.scheme, host, self.port)
        self._identity = identity
        self._on_lost = on_lost
        self._timeout_s = timeout_s
        self._gates: dict[str, InputGate] = {}
        self._gates_set = threading.Event()
        self._closing = False

    def serve_gates(self, gates: dict[str, InputGate]) -> None:
        """Accept channels for `gates`, by chain id. Earlier calls wait for this."""
        self._gates = gates
        self._gates_set.set()

    def close(self, timeout_s: float) -> bool:
        """Accept no more channels. Return True if all streams end within `timeout_s`.

        Streams that end from now on are not reported as losses. A stream whose sender is cut off
        does not end.
        """
        # Calls that wait for the deployment end now, with the reason.
        self._closing = True
        self._gates_set.set()
        ending = threading.Thread(target=self.shutdown, name="data shutdown", daemon=True)
        ending.start()
        ending.join(timeout_s)
        return not ending.is_alive()

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Serve one channel until its sender closes it. Runs on one of Flight's threads."""
        job, attempt, target, chain, source, number = (part.decode() for part in descriptor.path)
        # A later attempt may reuse an address, and two machines may have the same address: rows for
        # another slot must be refused.
        meant = SlotIdentity(job, int(attempt), int(target))
        if meant != self._identity:
            raise flight.FlightServerError(
                f"a channel to {meant} was connected to {self._identity}. {ADDRESS_ADVICE}"
            )
        # Peers may be deployed earlier, and connect before this slot has its gates.
        if not self._gates_set.wait(self._timeout_s):
            raise flight.FlightServerError("this slot was not deployed in time")
        if self._closing:
            raise flight.FlightServerError("this slot shuts down")
        gate = self._gates[chain]
        channel = int(number)
        credit = _CreditLine(writer)
        gate.attach(channel, credit.give)
        closed = False
        try:
            closed = _receive(reader, gate, channel, credit)
        except (pa.ArrowException, OSError) as error:
            if not self._closing:
                self._on_lost(f"slot {source} is lost: its channel to {chain} broke: {error}")
                return
        finally:
            credit.end()
        if not closed and not self._closing:
            self._on_lost(f"slot {source} is lost: its channel to {chain} ended")


class _CreditLine:
    """Sends credits to a sender while its stream exists.

    Batches may be taken after the stream's end. A write to a stream that Flight has freed would
    crash the process.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._lock = threading.Lock()
        self._ended = False

    def give(self, count: int) -> None:
        """Send credits. Called on the thread that took a batch."""
        self._write(count)

    def answer(self) -> None:
        """Answer that this slot is alive."""
        self._write(0)

    def _write(self, count: int) -> None:
        # A sender that is gone needs no credit; the reading side notices its loss.
        with self._lock, contextlib.suppress(pa.ArrowException, OSError):
            if not self._ended:
                self._writer.write_metadata(_CREDIT.pack(count))

    def end(self) -> None:
        """Refuse further writes, and wait for a running write."""
        with self._lock:
            self._ended = True


def _receive(reader: Any, gate: InputGate, channel: int, credit: _CreditLine) -> bool:
    """Feed `gate` until the stream ends. Return True if the sender has sent the end mark."""
    while True:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return False
        metadata = metadata_of(chunk)
        kind = metadata[:1]
        if kind == _DATA:
            # The key hashes are sent as a last column, so that they are computed only once.
            rows = chunk.data
            last = rows.num_columns - 1
            hashes = rows.column(last).to_numpy()
            watermark = _WATERMARK.unpack(metadata[1:])[0] if len(metadata) > 1 else None
            gate.put(channel, Batch(rows.remove_column(last), hashes, watermark))
        elif kind == _BARRIER:
            gate.put(channel, _BARRIERS.decode(metadata[1:]))
        elif kind == _END:
            gate.put(channel, EndOfStream())
        elif kind == _ASK:
            credit.answer()
        else:
            return True


class FlightChannel(OutputChannel):
    """A channel to a subtask of another slot."""

    def __init__(
        self,
        client: flight.FlightClient,
        credentials: Credentials,
        *,
        chain: str,
        source: int,
        target: SlotIdentity,
        channel: int,
        schema: pa.Schema,
    ) -> None:
        """Open the channel.

        `source` is the sending slot; `channel` is the number at the target's gate.
        """
        super().__init__()
        named = (target.job, str(target.attempt), str(target.slot), chain, str(source))
        path = [part.encode() for part in (*named, str(channel))]
        self.name = f"{chain}[{target.slot}] from {source}"
        self.target = target.slot
        self.heard_at = time.monotonic()
        """The time of the peer's last sign of life; before the first one, the time of opening."""
        self.answered = False
        self._schema = schema.append(pa.field(HASH_COLUMN, pa.uint64()))
        try:
            self._writer, self._reader = client.do_exchange(
                flight.FlightDescriptor.for_path(*path), credentials.of_call()
            )
            self._writer.begin(self._schema)
        except (pa.ArrowException, OSError) as error:
            raise SlotLost(f"channel {self.name} cannot be opened: {error}") from error
        self._closed = False
        self._write_lock = threading.Lock()
        threading.Thread(
            target=self._take_credits, name=f"credits {self.name}", daemon=True
        ).start()

    def _write(self, element: Element) -> None:
        try:
            match element:
                case Batch(rows, hashes, watermark):
                    assert hashes is not None
                    column = pa.array(hashes, pa.uint64())
                    batch = pa.record_batch([*rows.columns, column], schema=self._schema)
                    with self._write_lock:
                        suffix = b"" if watermark is None else _WATERMARK.pack(watermark)
                        self._writer.write_with_metadata(batch, _DATA + suffix)
                case Barrier():
                    with self._write_lock:
                        self._writer.write_metadata(_BARRIER + msgspec.msgpack.encode(element))
                case EndOfStream():
                    with self._write_lock:
                        self._writer.write_metadata(_END)
        except (pa.ArrowException, OSError) as error:
            raise SlotLost(f"channel {self.name} broke: {error}") from error

    def close(self, reason: str) -> None:
        """Send the peer the end mark, and wake the sender.

        Returns within `CHANNEL_CLOSE_TIMEOUT_S`. If the peer takes nothing any more, the call is
        broken. A sender in the middle of a write may stay blocked after that.
        """
        if self._closed:
            return
        self._closed = True
        self.refuse(reason)
        # A peer that takes nothing blocks each thread that writes to it.
        closing = threading.Thread(target=self._say_close, name=f"close {self.name}", daemon=True)
        closing.start()
        closing.join(CHANNEL_CLOSE_TIMEOUT_S)
        if closing.is_alive():
            self._reader.cancel()

    def _say_close(self) -> None:
        # gRPC aborts the process if two threads write to one stream at once, or if both end it. The
        # peer answers by ending its side, and then the reading thread ends this side.
        with self._write_lock, contextlib.suppress(pa.ArrowException, OSError):
            self._writer.write_metadata(_CLOSE)

    def ask(self) -> None:
        """Ask the peer for a sign of life, unless a write to it is running."""
        # Do not wait for a write that hangs: the other channels must be asked, too.
        if not self._write_lock.acquire(blocking=False):
            return
        try:
            if not self._closed:
                with contextlib.suppress(pa.ArrowException, OSError):
                    self._writer.write_metadata(_ASK)
        finally:
            self._write_lock.release()

    def _take_credits(self) -> None:
        try:
            while True:
                metadata = metadata_of(self._reader.read_chunk())
                self.heard_at, self.answered = time.monotonic(), True
                self.release(_CREDIT.unpack(metadata)[0])
        except StopIteration:
            self.refuse(f"channel {self.name}: the reader has closed the connection")
        except (pa.ArrowException, OSError) as error:
            self.refuse(f"channel {self.name} broke: {error}")


_QUESTIONS = 4
"""The number of questions within the timeout: a single lost packet must not end the peer."""


class KeepAlive:
    """Detects that a channel's peer is frozen or cut off, although its connection stays open.

    An idle connection never times out by itself, and a slow reader is no error. So each channel
    asks its peer's transport, which answers independently of the operators. A separate thread asks,
    because a frozen peer may block it; `check` never waits.
    """

    def __init__(
        self,
        channels: Sequence[FlightChannel],
        lost: Callable[[str], None],
        *,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self._channels = channels
        self._lost = lost
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._ended = threading.Event()
        threading.Thread(target=self._ask, name="keep alive", daemon=True).start()

    def check(self, now: float) -> None:
        """Report the peer that has been silent for the longest time, if that exceeds the limit."""
        for channel in sorted(self._channels, key=lambda candidate: candidate.heard_at):
            silent_s = now - channel.heard_at
            # The peer may still be starting before its first answer.
            limit_s = self._timeout_s if channel.answered else self._start_timeout_s
            if silent_s > limit_s:
                self._lost(
                    f"slot {channel.target} is lost: channel {channel.name} has had no answer for"
                    f" {silent_s:.0f} s, though its connection stands;"
                    f" heartbeat_timeout_s={self._timeout_s}"
                )
                return

    def end(self) -> None:
        """Stop asking."""
        self._ended.set()

    def _ask(self) -> None:
        while not self._ended.wait(self._timeout_s / _QUESTIONS):
            # A channel with recent traffic needs no question.
            before = time.monotonic() - self._timeout_s / _QUESTIONS
            for channel in self._channels:
                if channel.heard_at < before:
                    channel.ask()
