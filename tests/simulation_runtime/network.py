"""Streams between driver and slots, and between slots, in memory: in order; a death loses items."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from tests.simulation_runtime.scheduler import Process, Task, scheduler
from tests.simulation_runtime.threads import Event

from onceflow.core.errors import SlotLost
from onceflow.core.protocol.loops.attempt_facts import SlotGone, SlotMessageReceived
from onceflow.core.protocol.loops.slot import DriverLost
from onceflow.core.protocol.messages import DriverMessage, Hello, Shutdown, SlotMessage
from onceflow.core.runtime.dataflow.channels import Element, InputGate, OutputChannel
from onceflow.core.runtime.messages import decode_message, encode_message
from onceflow.core.runtime.transport.control_plane import SlotConnected
from onceflow.core.runtime.transport.data_plane import SlotIdentity

DELAY_MAX_S = 0.02
"""The longest time that a message, or the news of a death, is on its way."""


class Pipe:
    """One direction of a stream."""

    def __init__(self, sender: Process, receiver: Process) -> None:
        self._items: deque[Any] = deque()
        self._reader: Task | None = None
        self._is_ended = False
        sender.on_end.append(lambda: self._break(loses=True))
        receiver.on_end.append(lambda: self._break(loses=False))

    @property
    def is_ended(self) -> bool:
        return self._is_ended

    def put(self, item: Any) -> bool:
        """Send `item`; return False if nobody can take it any more."""
        scheduler().maybe_pause()
        if self._is_ended:
            return False
        self._items.append(item)
        self._wake()
        return True

    def send(self, count: int) -> None:
        """Send `count`, if anybody is there to take it."""
        self.put(count)

    def get(self) -> Any:
        """Return the next item; raise EOFError at the end."""
        run = scheduler()
        run.maybe_pause()
        if run.rng.random() < 0.1:
            run.sleep(run.rng.random() * DELAY_MAX_S)
        while not self._items:
            if self._is_ended:
                raise EOFError
            self._reader = run.require_alive()
            run.park(None)
        return self._items.popleft()

    def end(self) -> None:
        """Send nothing more."""
        self._is_ended = True
        self._wake()

    def _break(self, *, loses: bool) -> None:
        run = scheduler()
        # What was sent may not have left the machine.
        while loses and self._items and run.rng.random() < 0.5:
            self._items.pop()
        self.end()

    def _wake(self) -> None:
        if self._reader is not None:
            scheduler().wake(self._reader)


class Network:
    """The listeners, by address."""

    def __init__(self) -> None:
        self.control: dict[str, ControlServer] = {}
        self.data: dict[str, DataServer] = {}
        self._addresses = 0

    def draw_address(self) -> str:
        self._addresses += 1
        return f"sim://{self._addresses}"


_network: list[Network] = [Network()]


def begin_network() -> None:
    """Forget all that listened before."""
    _network[0] = Network()


def own_process() -> Process:
    """Return the process of the task that runs now."""
    return scheduler().require_alive().process


class Credentials:
    """Takes the place of tokens and certificates."""

    scheme = "sim"

    def __init__(self, token: str, identity: object = None) -> None:
        del token, identity

    def slot_client(self, address: str) -> str:
        return address


class SlotLink:
    """The driver's end of one slot's control stream."""

    def __init__(self, hello: Hello, pipe: Pipe) -> None:
        self.hello = hello
        self._pipe = pipe

    def send(self, message: DriverMessage) -> None:
        self._pipe.put(encode_message(message))

    def waiting_s(self, now: float) -> float:
        del now
        return 0.0


class ControlServer:
    """Accepts the slots of one attempt."""

    def __init__(self, host: str, credentials: Credentials, post: Callable[[object], None]) -> None:
        del host, credentials
        self.process = own_process()
        self.address = _network[0].draw_address()
        _network[0].control[self.address] = self
        self._post = post
        self._links: list[SlotLink] = []
        self._refusal: Shutdown | None = None
        self._is_closed = False

    @property
    def is_listening(self) -> bool:
        return not (self._is_closed or self.process.is_dead)

    def dismiss(self, reason: str) -> None:
        self._refusal = Shutdown(reason)
        for link in list(self._links):
            link.send(self._refusal)

    def close(self, timeout_s: float) -> bool:
        del timeout_s
        self._is_closed = True
        return True

    def serve(self, hello: Hello, upward: Pipe, downward: Pipe) -> None:
        """Have a task of this process read what the slot says."""
        run = scheduler()
        link = SlotLink(hello, downward)

        def read() -> None:
            self._links.append(link)
            if self._refusal is not None:
                link.send(self._refusal)
            self._post(SlotConnected(link))  # type: ignore[arg-type]
            try:
                while True:
                    message = decode_message(upward.get())
                    self._post(SlotMessageReceived(hello.attempt, hello.slot, message))  # type: ignore[arg-type]
            except EOFError:
                pass
            self._post(SlotGone(hello.slot, hello.attempt, "its stream has ended"))
            self._links.remove(link)
            downward.end()

        run.spawn(self.process, f"from slot {hello.slot}", read)


class ControlStream:
    """A slot's end of its control stream."""

    def __init__(
        self, address: str, credentials: Credentials, hello: Hello, post: Callable[[Any], None]
    ) -> None:
        del credentials
        server = _network[0].control[address]
        if not server.is_listening:
            raise SlotLost(f"the job driver at {address} cannot be reached")
        mine = own_process()
        self._upward, self._downward = Pipe(mine, server.process), Pipe(server.process, mine)
        self._post = post
        server.serve(hello, self._upward, self._downward)
        scheduler().spawn(mine, "from the driver", self._read)

    def send(self, message: SlotMessage) -> None:
        if not self._upward.put(encode_message(message)):
            raise SlotLost("the job's driver has closed the connection")

    def close(self, timeout_s: float) -> None:
        del timeout_s
        self._upward.end()

    def _read(self) -> None:
        try:
            while True:
                self._post(decode_message(self._downward.get()))
        except EOFError:
            self._post(DriverLost("the job's driver has closed the connection"))


class DataServer:
    """Receives the channels that end in one slot."""

    def __init__(
        self,
        host: str,
        credentials: Credentials,
        identity: SlotIdentity,
        on_lost: Callable[[str], None],
        timeout_s: float,
    ) -> None:
        del host, credentials, identity
        self.process = own_process()
        self.address = _network[0].draw_address()
        _network[0].data[self.address] = self
        self._on_lost = on_lost
        self._timeout_s = timeout_s
        self._gates: dict[str, InputGate] = {}
        self._gates_set = Event()
        self._is_closing = False

    def serve_gates(self, gates: dict[str, InputGate]) -> None:
        self._gates = gates
        self._gates_set.set()

    def close(self, timeout_s: float) -> bool:
        del timeout_s
        self._is_closing = True
        self._gates_set.set()
        return True

    def serve(self, chain: str, source: int, channel: int, rows: Pipe, back: Pipe) -> None:
        """Have a task of this process feed the gate."""

        def read() -> None:
            if not self._gates_set.wait(self._timeout_s) or self._is_closing:
                back.end()
                return
            gate = self._gates[chain]
            gate.attach(channel, back.send)
            try:
                while (element := rows.get()) is not None:
                    gate.put(channel, element)
            except EOFError:
                if not self._is_closing:
                    self._on_lost(f"slot {source} is lost: its channel to {chain} ended")
            back.end()

        scheduler().spawn(self.process, f"channel to {chain} from {source}", read)


class FlightChannel(OutputChannel):
    """A channel to a subtask of another slot."""

    def __init__(
        self,
        client: str,
        credentials: Credentials,
        *,
        chain: str,
        source: int,
        target: SlotIdentity,
        channel: int,
        schema: object,
    ) -> None:
        super().__init__()
        del credentials, schema
        self.name = f"{chain}[{target.slot}] from {source}"
        server, mine = _network[0].data[client], own_process()
        if server.process.is_dead:
            raise SlotLost(f"channel {self.name} cannot be opened")
        self._rows, self._credits = Pipe(mine, server.process), Pipe(server.process, mine)
        self._is_closed = False
        server.serve(chain, source, channel, self._rows, self._credits)
        scheduler().spawn(mine, f"credits {self.name}", self._take_credits)

    def _write(self, element: Element) -> None:
        if not self._rows.put(element):
            raise SlotLost(f"channel {self.name} broke")

    def close(self, reason: str) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.refuse(reason)
            self._rows.put(None)

    def _take_credits(self) -> None:
        try:
            while True:
                self.release(self._credits.get())
        except EOFError:
            self.refuse(f"channel {self.name}: the reader has closed the connection")


class KeepAlive:
    """Asks nobody: each death is noticed by the streams."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def check(self, now: float) -> None:
        del now

    def end(self) -> None:
        pass
