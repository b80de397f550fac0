"""The control stream: one bidirectional Flight exchange between the job driver and each slot.

Every slot connects to the driver, because executors can always reach the driver, but not the other
way round. The first message of a stream is the slot's `Hello`. The stream ends when either side is
gone, and each side treats that as the loss of the other. A sender never waits for its peer: its
outbox waits.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import pyarrow as pa
from pyarrow import flight

from onceflow.core.errors import MessageCorrupt, SettingsRefused, SlotLost
from onceflow.core.protocol import messages
from onceflow.core.protocol.loops.attempt_facts import SlotGone, SlotMessageReceived
from onceflow.core.protocol.loops.slot import DriverLost
from onceflow.core.protocol.messages import DriverMessage, SlotMessage
from onceflow.core.runtime.messages import decode_message, encode_message
from onceflow.core.runtime.transport.addresses import to_location
from onceflow.core.runtime.transport.credentials import Credentials, metadata_of


class Outbox:
    """A queue and the thread that writes it to one stream, in order. Methods: any thread.

    The queue is limited in time, not in length: the owner gives up a peer whose messages have
    waited too long, and sends few messages.
    """

    def __init__(self, name: str, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._last = False
        self._thread = threading.Thread(target=self._write_all, name=name, daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> bool:
        """Queue `data` for sending. Return False if the stream has ended."""
        with self._changed:
            if self._ended or self._last:
                return False
            self._waiting.append((time.monotonic(), data))
            self._changed.notify()
            return True

    def waiting_s(self, now: float) -> float:
        """Return the time that the oldest message has waited; 0 if no message waits."""
        with self._changed:
            return now - self._waiting[0][0] if self._waiting else 0.0

    def finish(self, timeout_s: float) -> bool:
        """Accept no more messages. Return True if all are written within `timeout_s`."""
        with self._changed:
            self._last = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Drop all waiting messages, and wait until no write is running.

        Only for streams that have ended: a write to such a stream fails at once.
        """
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._last or self._ended):
                    self._changed.wait()
                # `_last` with an empty queue: everything is written, and `finish` may return.
                if self._ended or not self._waiting:
                    self._ended = True
                    return
                # Keep the message in the queue during the write, so that `waiting_s` counts it.
                _, data = self._waiting[0]
            # Without the lock: a peer that takes nothing blocks only this thread.
            try:
                self._write(data)
            except (pa.ArrowException, OSError):
                # The peer is gone; the thread that reads from it notices and reports that.
                with self._changed:
                    self._ended = True
                    self._waiting.clear()
                return
            with self._changed:
                self._waiting.popleft()


_PATH = flight.FlightDescriptor.for_path(b"control")
_EXIT_TIMEOUT_S = 10.0
"""The time that the interpreter's exit waits for a stream that does not end."""


class SlotLink:
    """The driver's end of one slot's control stream."""

    def __init__(self, hello: messages.Hello, writer: Any) -> None:
        self.hello = hello
        self._outbox = Outbox(f"to slot {hello.slot}", writer.write_metadata)

    def send(self, message: DriverMessage) -> None:
        """Send `message` without waiting for the slot.

        If the slot is gone the message is dropped; another thread reports the loss.
        """
        self._outbox.put(encode_message(message))

    def waiting_s(self, now: float) -> float:
        """Return the time that the oldest message to the slot has waited; 0 if none waits."""
        return self._outbox.waiting_s(now)

    def close(self) -> None:
        """Stop sending, after the stream has ended."""
        self._outbox.close()


@dataclass(frozen=True, slots=True)
class SlotConnected:
    """An event: a slot has connected."""

    link: SlotLink


ControlEvent: TypeAlias = SlotConnected | SlotMessageReceived | SlotGone


def _explain_refusal(host: str, error: pa.ArrowException) -> str:
    """Return why `host` cannot be listened at. gRPC does not report an unresolvable name."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as unresolved:
        return unresolved.strerror or str(unresolved)
    return str(error)


class ControlServer(flight.FlightServerBase):
    """Accepts the slots of one attempt and turns their messages into events."""

    def __init__(
        self, host: str, credentials: Credentials, post: Callable[[ControlEvent], None]
    ) -> None:
        """Listen at `host`, at any free port.

        Raises:
            SettingsRefused: `host` does not resolve, or is not an address of this machine.
        """
        try:
            super().__init__(to_location(credentials.scheme, host, 0), **credentials.of_server())
        except pa.ArrowException as error:
            raise SettingsRefused(
                f"the driver cannot listen at {host}, the address for its slots:"
                f" {_explain_refusal(host, error)}. Make sure that the name resolves to an"
                " address of this machine, or set RuntimeSettings(driver_host=…)"
            ) from error
        self.address = to_location(credentials.scheme, host, self.port)
        self._post = post
        self._lock = threading.Lock()
        self._links: list[SlotLink] = []
        self._refusal: messages.Shutdown | None = None

    def dismiss(self, reason: str) -> None:
        """Tell every slot to leave, including slots that connect later.

        An attempt may fail before it has heard of a slot. That slot would otherwise wait for work
        until it is killed.
        """
        with self._lock:
            self._refusal = messages.Shutdown(reason)
            for link in self._links:
                link.send(self._refusal)

    def close(self, timeout_s: float) -> bool:
        """Accept no more slots. Return True if all streams end within `timeout_s`.

        The stream of a slot that is cut off ends only when the network gives it up. If a stream
        ended during the interpreter's exit, it would abort the process: so the exit waits for it,
        up to a deadline.
        """
        ending = threading.Thread(target=self.shutdown, name="control shutdown", daemon=True)
        ending.start()
        ending.join(timeout_s)
        if ending.is_alive():
            atexit.register(ending.join, _EXIT_TIMEOUT_S)
        return not ending.is_alive()

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Serve one slot until its stream ends. Runs on one of Flight's threads."""
        hello = decode_message(metadata_of(reader.read_chunk()))
        if not isinstance(hello, messages.Hello):
            raise flight.FlightServerError(f"a control stream begins with Hello, not {hello!r}")
        link = SlotLink(hello, writer)
        with self._lock:
            self._links.append(link)
            # Under the lock of `dismiss`: `dismiss` finds the slot in the list, or the slot sees
            # the refusal here.
            if self._refusal is not None:
                link.send(self._refusal)
        # Post before reading, so that the connection comes before all messages of the slot.
        self._post(SlotConnected(link))
        reason = f"its process {hello.pid} on {hello.host} ended or became unreachable"
        try:
            while True:
                data = metadata_of(reader.read_chunk())
                message = cast("SlotMessage", decode_message(data))
                self._post(SlotMessageReceived(hello.attempt, hello.slot, message))
        except StopIteration:
            pass
        except (pa.ArrowException, OSError, MessageCorrupt) as error:
            reason = f"{reason} ({error})"
        finally:
            self._post(SlotGone(hello.slot, hello.attempt, reason))
            with self._lock:
                self._links.remove(link)
            link.close()


class ControlStream:
    """A slot's end of its control stream, and the thread that reads from it."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        hello: messages.Hello,
        post: Callable[[DriverMessage | DriverLost | messages.PartFailed], None],
    ) -> None:
        """Connect to the driver and send hello. From now on `post` receives the driver's messages.

        Raises:
            SlotLost: The driver cannot be reached or refuses.
        """
        self._post = post
        try:
            self._client = credentials.driver_client(address)
            self._writer, self._reader = self._client.do_exchange(_PATH, credentials.of_call())
        except (pa.ArrowException, OSError) as error:
            raise SlotLost(f"the job driver at {address} cannot be reached: {error}") from error
        self._outbox = Outbox("to the driver", self._writer.write_metadata)
        self.send(hello)
        self._thread = threading.Thread(target=self._read, name="from the driver", daemon=True)
        self._thread.start()

    def send(self, message: SlotMessage) -> None:
        """Send `message` to the driver, without waiting for it. Any thread.

        Raises:
            SlotLost: The driver is gone.
        """
        if not self._outbox.put(encode_message(message)):
            raise SlotLost("the job's driver has closed the connection")

    def close(self, timeout_s: float) -> None:
        """End the stream in order, or break it after `timeout_s`.

        In the orderly case the driver ends its side, which ends the stream.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(pa.ArrowException, OSError):
            # Two threads must not write to one stream: call `done_writing` only after the outbox
            # has ended.
            if self._outbox.finish(timeout_s):
                self._writer.done_writing()
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._reader.cancel()
                self._thread.join(timeout_s)
            self._client.close()

    def _read(self) -> None:
        reason = "the job's driver has closed the connection"
        try:
            while True:
                data = metadata_of(self._reader.read_chunk())
                self._post(cast("DriverMessage", decode_message(data)))
        except StopIteration:
            pass
        except (pa.ArrowException, OSError) as error:
            reason = f"{reason}: {error}"
        except MessageCorrupt as error:
            self._post(messages.PartFailed(error))
        self._post(DriverLost(reason))
