"""Virtual time, the threads of simulated processes, and servers that are asked over a network.

Everything is drawn from one seed. A thread is a generator that yields how long it is busy, or a
request to a server; a request that is under way takes effect also when whoever sent it is gone.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

START_S = 1000.0


class Violation(AssertionError):
    """An invariant of the design is broken; the message begins with its number."""


class Gone(Exception):
    """The connection broke: before the request took effect, or after it and before its reply."""


class Clock:
    """Runs events in virtual time; events of one moment in an order drawn by the seed."""

    def __init__(self, rng: random.Random) -> None:
        self.now_s = START_S
        self.rng = rng
        self.trace: list[str] = []
        self._ahead_s = 1_700_000_000.0
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._count = 0

    def wall_ms(self) -> int:
        """Return the machine's time, which may be set at any moment."""
        return int((self.now_s + self._ahead_s) * 1000)

    def set_wall(self, by_s: float) -> None:
        self.say(f"the wall clock is set by {by_s:.0f} s")
        self._ahead_s += by_s

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        self._count += 1
        at = self.now_s + delay_s
        heapq.heappush(self._events, (at, self.rng.random(), self._count, event))

    def say(self, text: str) -> None:
        self.trace.append(f"{self.now_s - START_S:8.3f}  {text}")

    def run(self, done: Callable[[], bool], limit_s: float) -> bool:
        end = self.now_s + limit_s
        while self._events and not done():
            at, _, _, event = heapq.heappop(self._events)
            if at > end:
                return False
            self.now_s = at
            event()
        return done()


@dataclass(frozen=True)
class Request:
    """The request that a thread yields to ask a server."""

    server: Server
    effect: Callable[[], Any]


@dataclass(frozen=True)
class Sleep:
    """The value that a thread yields to wait until its bell rings, or for `limit_s`."""

    bell: Bell
    limit_s: float | None = None


Steps = Generator["float | Request | Sleep", Any, T]


class Bell:
    """Wakes one thread: who gives it something to do rings."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sleeper: Callable[[], None] | None = None

    def ring(self) -> None:
        """Wake the thread a moment later, if it sleeps."""
        sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            self._clock.after(0.01 * self._clock.rng.random(), sleeper)

    def wake(self, sleeper: Callable[[], None], limit_s: float | None) -> None:
        """Call `sleeper` when the bell rings, or after `limit_s`."""
        self._sleeper = sleeper

        def late() -> None:
            if self._sleeper is sleeper:
                self._sleeper = None
                sleeper()

        if limit_s is not None:
            self._clock.after(limit_s, late)


class Server:
    """Takes effects one by one, in the order in which requests arrive."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.fault_rate = 0.0
        self.slow_rate = 0.0
        self.faults: int = 0
        """The number of requests that have broken so far."""

    def ask(self, effect: Callable[[], Any]) -> Request:
        return Request(self, effect)

    def serve(self, effect: Callable[[], Any], reply: Callable[[Any], None]) -> None:
        rng = self.clock.rng
        broken = rng.random() < self.fault_rate
        lost_before = broken and rng.random() < 0.5
        way_s = rng.choice((0.2, 2.0)) if rng.random() < self.slow_rate else 0.002

        def arrive() -> None:
            answer: Any = Gone()
            if not lost_before:
                try:
                    answer = effect()
                except Gone as gone:
                    answer = gone
            if broken:
                self.faults += 1
                answer = Gone()
            self.clock.after(rng.expovariate(1 / way_s), lambda: reply(answer))

        self.clock.after(rng.expovariate(1 / way_s), arrive)


class Process:
    """Lives until it is killed, at any step; nothing of it survives but requests under way."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.alive = True

    def kill(self, why: str) -> None:
        """End it now."""
        self.clock.say(f"{why}: a process dies")
        self.alive = False

    def begin(self, steps: Steps[Any]) -> None:
        """Run a thread of this process."""
        self._go_on(steps, None)

    def _go_on(self, steps: Steps[Any], answer: Any) -> None:
        if not self.alive:
            steps.close()
            return
        try:
            wanted = steps.throw(answer) if isinstance(answer, Gone) else steps.send(answer)
        except StopIteration:
            return
        if isinstance(wanted, Request):
            wanted.server.serve(wanted.effect, lambda reply: self._go_on(steps, reply))
        elif isinstance(wanted, Sleep):
            wanted.bell.wake(lambda: self._go_on(steps, None), wanted.limit_s)
        else:
            delay_s = wanted * self.clock.rng.uniform(0.2, 2.0)
            self.clock.after(delay_s, lambda: self._go_on(steps, None))


@dataclass
class Network:
    """The faults of the network between drivers and slots."""

    loss: float
    doubling: float


class Stream:
    """One direction of one slot's control stream: what is sent comes in the order it was sent.

    A real stream loses and doubles nothing. Here a word may be lost, and one that has come may come
    again later, whatever has come meanwhile: nothing is to depend on either.
    """

    def __init__(self, clock: Clock, network: Network) -> None:
        self._clock, self._network = clock, network
        self._under_way: deque[Callable[[], None]] = deque()
        self._comes_at_s = 0.0
        """When the last of these does."""

    def send(self, deliver: Callable[[], None]) -> None:
        rng = self._clock.rng
        if rng.random() < self._network.loss:
            return
        self.carry(deliver)
        if rng.random() < self._network.doubling:
            again_s = self._comes_at_s - self._clock.now_s + rng.expovariate(1 / 0.3)
            self._clock.after(again_s, deliver)

    def carry(self, deliver: Callable[[], None]) -> None:
        """Send what is neither lost nor doubled."""
        rng, now_s = self._clock.rng, self._clock.now_s
        late_s = rng.uniform(0.0, 1.0) if self._network.loss and rng.random() < 0.05 else 0.0
        at_s = now_s + late_s + rng.expovariate(1 / 0.02)
        self._comes_at_s = max(self._comes_at_s, at_s)
        self._under_way.append(deliver)
        self._clock.after(self._comes_at_s - now_s, self._arrive)

    def end(self, deliver: Callable[[], None]) -> None:
        """Whoever sends is gone, and so may be the last of what it has sent; `deliver` says so."""
        for _ in range(self._clock.rng.randint(0, len(self._under_way))):
            self._under_way.pop()
        self.carry(deliver)

    def _arrive(self) -> None:
        if self._under_way:
            self._under_way.popleft()()
