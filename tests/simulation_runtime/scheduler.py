"""Threads as steps of one thread: which of them goes on, and what time it is, is drawn by a seed.

A task is what the product takes for a thread. It runs until it waits, or until it pauses where a
thread could be interrupted. Tasks belong to processes, and a process can be killed between any two
steps: none of its tasks takes another step that has an effect.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

STEP_S = 1e-5
"""The time that goes by with each step."""
PAUSE_MAX_S = 0.5
"""For how long a task that could go on does not."""
WALL_S = 1_800_000_000.0
"""The time of day at which each schedule begins."""


class Killed(BaseException):
    """The process of this task is dead."""


class Violation(AssertionError):
    """The product has broken a guarantee."""


class Process:
    """Tasks that die together."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.tasks: list[Task] = []
        self.on_end: list[Callable[[], None]] = []
        """Called once the process is dead, outside of all tasks."""
        scheduler.processes.append(self)


class Task:
    """The simulated thread of the product."""

    __slots__ = ("greenlet", "has_ended", "is_parked", "name", "process", "turn", "was_woken")

    def __init__(self, process: Process, name: str, run: Callable[[], object]) -> None:
        self.process = process
        self.name = name
        self.greenlet = greenlet(run)
        self.has_ended = False
        self.is_parked = False
        self.was_woken = False
        self.turn = 0
        """Rises with each wait, so that the timer of an older wait is known as such."""


class Scheduler:
    """Runs one task at a time."""

    def __init__(self, rng: random.Random, pause_rate: float) -> None:
        self.rng = rng
        self.now_s = 1_000.0
        self.steps = 0
        self.processes: list[Process] = []
        self.trace: list[tuple[float, object]] = []
        self.steps_of_protocol: list[tuple[str, bytes]] = []
        """The process and the line of each step that the product has recorded."""
        self.current: Task | None = None
        self._pause_rate = pause_rate
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._timer_count = 0
        self._exits: list[Process] = []
        self._faults: list[tuple[int, int, Callable[[], None]]] = []
        self._hub = getcurrent()

    # --- what tasks call ------------------------------------------------------------------------

    def spawn(self, process: Process, name: str, work: Callable[[], object]) -> Task:
        """Have `work` run as a task of `process`."""

        def run() -> None:
            try:
                work()
            except Killed:
                pass
            finally:
                task.has_ended = True

        task = Task(process, name, run)
        task.greenlet.parent = self._hub
        process.tasks.append(task)
        self._ready.append(task)
        return task

    def require_alive(self) -> Task:
        """Return the task that runs now; raise Killed if its process is dead."""
        task = self.current
        if task is None:
            raise RuntimeError("the product's threads run inside of tasks only")
        if task.process.is_dead:
            raise Killed
        return task

    def pause(self) -> None:
        """Let others go on before this task does."""
        task = self.require_alive()
        self._ready.append(task)
        self._switch(task)

    def maybe_pause(self) -> None:
        """Pause at times."""
        if self.rng.random() < self._pause_rate:
            self.pause()
        else:
            self.require_alive()

    def park(self, timeout_s: float | None) -> bool:
        """Wait to be woken; return whether that came before `timeout_s`."""
        task = self.require_alive()
        task.is_parked, task.was_woken = True, False
        task.turn += 1
        if timeout_s is not None:
            self._timer_count += 1
            at_s = self.now_s + max(0.0, timeout_s)
            heapq.heappush(self._timers, (at_s, self._timer_count, task, task.turn))
        self._switch(task)
        return task.was_woken

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        self.park(seconds)

    def wake(self, task: Task) -> None:
        """Have a parked task go on."""
        if task.is_parked:
            task.is_parked, task.was_woken = False, True
            self._ready.append(task)

    def exit_process(self) -> None:
        """End the process of the task that runs now, as `os._exit` does."""
        self.condemn(self.require_alive().process)
        raise Killed

    def condemn(self, process: Process) -> None:
        """Kill `process` before the next step."""
        if not process.is_dead:
            process.is_dead = True
            self._exits.append(process)

    # --- what the world calls -------------------------------------------------------------------

    def note(self, event: object) -> None:
        """Add a line to the trace."""
        self.trace.append((self.now_s, event))

    def describe_trace(self) -> list[str]:
        """Return the lines of the trace."""
        return [f"{now_s - 1_000:9.4f} {str(event)[:300]}" for now_s, event in self.trace]

    def at_step(self, step: int, fault: Callable[[], None]) -> None:
        """Call `fault` between two steps, outside of all tasks."""
        heapq.heappush(self._faults, (step, len(self._faults) + self.steps, fault))

    def kill(self, process: Process) -> None:
        """Kill `process` now. Called outside of its tasks."""
        process.is_dead = True
        self._end(process)

    def run(self, is_over: Callable[[], bool], steps_max: int) -> None:
        """Run tasks until `is_over`."""
        while not is_over():
            self._end_exited()
            while self._faults and self._faults[0][0] <= self.steps:
                heapq.heappop(self._faults)[2]()
                if is_over():
                    return
            task = self._next()
            self.steps += 1
            self.now_s += STEP_S
            if self.steps > steps_max:
                raise Violation(f"the job has not ended after {steps_max} steps")
            self._enter(task)

    def close(self) -> None:
        """Kill all that is left."""
        for process in self.processes:
            if not process.is_dead:
                process.on_end.clear()
                self.kill(process)

    def _next(self) -> Task:
        ready = self._ready
        while True:
            # At times the clock goes on although somebody could work: that one is slow.
            if ready and not (
                self._timers
                and self._timers[0][0] < self.now_s + PAUSE_MAX_S
                and self.rng.random() < 0.01
            ):
                index = int(self.rng.random() * len(ready))
                ready[index], ready[-1] = ready[-1], ready[index]
                task = ready.pop()
                if not (task.has_ended or task.process.is_dead):
                    return task
            elif self._timers:
                at_s, _, task, turn = heapq.heappop(self._timers)
                if task.is_parked and task.turn == turn and not task.process.is_dead:
                    self.now_s = max(self.now_s, at_s)
                    task.is_parked = False
                    ready.append(task)
            else:
                raise Violation("everybody waits for ever")

    def _enter(self, task: Task) -> None:
        self.current = task
        try:
            task.greenlet.switch()
        finally:
            self.current = None

    def _switch(self, task: Task) -> None:
        self._hub.switch()
        self.current = task
        if task.process.is_dead:
            raise Killed

    def _end_exited(self) -> None:
        while self._exits:
            self._end(self._exits.pop())

    def _end(self, process: Process) -> None:
        for task in process.tasks:
            self.current = task
            for _ in range(20):
                if task.greenlet.dead or not task.greenlet:
                    break
                task.greenlet.throw(Killed)
            task.has_ended = True
        self.current = None
        process.tasks.clear()
        for call in process.on_end:
            call()
        process.on_end.clear()


_running: list[Scheduler] = []


def scheduler() -> Scheduler:
    """Return the scheduler that runs now."""
    return _running[-1]


@contextmanager
def scheduling(one: Scheduler) -> Generator[None]:
    """Have `one` run all tasks meanwhile."""
    _running.append(one)
    try:
        yield
    finally:
        _running.pop()


def do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""
