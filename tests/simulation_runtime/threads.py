"""Replacements of the standard library's threads and clocks for the product's modules."""

from __future__ import annotations

import concurrent.futures
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tests.simulation_runtime.scheduler import WALL_S, Killed, Task, do_nothing, scheduler

from onceflow.core import crash_points
from onceflow.core.state.api.context import StateClock


class Lock:
    """`threading.Lock` and `threading.RLock`."""

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        run = scheduler()
        run.maybe_pause()
        task = run.require_alive()
        while self._owner is not None and self._owner is not task:
            if self._owner.has_ended or self._owner.process.is_dead:
                break
            if not blocking:
                return False
            self._waiting.append(task)
            run.park(None if timeout < 0 else timeout)
        self._owner = task
        self._depth += 1
        return True

    def release(self) -> None:
        if self._owner is None:
            return
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            while self._waiting:
                task = self._waiting.popleft()
                if task.is_parked:
                    scheduler().wake(task)
                    return

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def release_all(self) -> int:
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def acquire_again(self, depth: int) -> None:
        self.acquire()
        self._depth = depth


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or Lock()
        self._waiting: deque[Task] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def acquire(self) -> bool:
        return self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        run = scheduler()
        self._waiting.append(run.require_alive())
        depth = self._lock.release_all()
        woken = run.park(timeout)
        self._lock.acquire_again(depth)
        return woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until_s = None if timeout is None else scheduler().now_s + timeout
        while not (result := predicate()):
            left_s = None if until_s is None else until_s - scheduler().now_s
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        while n and self._waiting:
            task = self._waiting.popleft()
            if task.is_parked:
                scheduler().wake(task)
                n -= 1

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._condition:
            self._is_set = True
            self._condition.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._is_set, timeout)


class Thread:
    """`threading.Thread`."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] = do_nothing,
        name: str = "",
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        del group
        self.name, self.daemon = name, daemon
        self._call = (target, tuple(args), dict(kwargs or {}))
        self._ended = Event()
        self._task: Task | None = None

    def start(self) -> None:
        run = scheduler()
        self._task = run.spawn(run.require_alive().process, self.name, self._run)

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._ended.is_set()

    def _run(self) -> None:
        target, args, kwargs = self._call
        target(*args, **kwargs)
        self._ended.set()


class Timer(Thread):
    """`threading.Timer`."""

    def __init__(self, interval: float, function: Callable[..., object], args: Any = ()) -> None:
        super().__init__(target=self._wait, args=(interval, function, args), name="timer")
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    def _wait(self, interval: float, function: Callable[..., object], args: Any) -> None:
        scheduler().sleep(interval)
        if not self._is_cancelled:
            function(*args)


class SimpleQueue:
    """`queue.SimpleQueue`, and `queue.Queue` without a bound."""

    def __init__(self, maxsize: int = 0) -> None:
        del maxsize
        self._items: deque[Any] = deque()
        self._waiting: deque[Task] = deque()

    def put(self, item: Any) -> None:
        run = scheduler()
        run.maybe_pause()
        self._items.append(item)
        while self._waiting:
            task = self._waiting.popleft()
            if task.is_parked:
                run.wake(task)
                return

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        run = scheduler()
        run.maybe_pause()
        until_s = None if timeout is None else run.now_s + timeout
        while not self._items:
            left_s = None if until_s is None else until_s - run.now_s
            if not block or (left_s is not None and left_s <= 0):
                raise queue.Empty
            self._waiting.append(run.require_alive())
            run.park(left_s)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Future(concurrent.futures.Future[Any]):
    """`concurrent.futures.Future`, whose waits are those of tasks."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()  # type: ignore[assignment]


class ThreadPoolExecutor:
    """`concurrent.futures.ThreadPoolExecutor`."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "") -> None:
        self._work: SimpleQueue = SimpleQueue()
        self._is_shut = False
        self._threads = [
            Thread(target=self._run, name=f"{thread_name_prefix}-{number}")
            for number in range(max_workers)
        ]
        self._is_started = False

    def submit(self, call: Callable[..., Any], *args: Any) -> Future:
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        if not self._is_started:
            self._is_started = True
            for thread in self._threads:
                thread.start()
        future = Future()
        self._work.put((future, call, args))
        return future

    def map(self, call: Callable[..., Any], *items: Iterable[Any]) -> Iterable[Any]:
        futures = [self.submit(call, *some) for some in zip(*items, strict=False)]
        return [future.result() for future in futures]

    def __enter__(self) -> ThreadPoolExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        self._is_shut = True
        while cancel_futures and not self._work.empty():
            future, _, _ = self._work.get()
            future.cancel()
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads if wait and self._is_started else ():
            thread.join()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, call, args = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call(*args)
            except Killed:
                raise
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)


def wait(futures: Iterable[Future], timeout: float | None = None) -> SimpleNamespace:
    """Do what `concurrent.futures.wait` does."""
    until_s = None if timeout is None else scheduler().now_s + timeout
    left: list[Future] = []
    for future in futures:
        left_s = None if until_s is None else max(0.0, until_s - scheduler().now_s)
        try:
            future.exception(left_s)
        except concurrent.futures.TimeoutError:
            left.append(future)
        except concurrent.futures.CancelledError:
            pass
    return SimpleNamespace(not_done=left)


def reach(point: str) -> None:
    """Let others go on at a point where tests of processes kill: a schedule may kill here, too."""
    del point
    scheduler().pause()


class _Clock:
    """The module `time`."""

    def monotonic(self) -> float:
        return scheduler().now_s

    perf_counter = thread_time = process_time = monotonic

    def monotonic_ns(self) -> int:
        return int(scheduler().now_s * 1e9)

    def time(self) -> float:
        return WALL_S + scheduler().now_s

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def sleep(self, seconds: float) -> None:
        scheduler().sleep(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class SimulatedStateClock(StateClock):
    """The clock of timers in processing time and of times to live."""

    def __init__(
        self, wall_clock: Callable[[], float] = lambda: WALL_S + scheduler().now_s
    ) -> None:
        super().__init__(wall_clock)


_MAIN = object()
_REPLACED: Sequence[tuple[object, object]] = (
    (
        threading,
        SimpleNamespace(
            Condition=Condition,
            Event=Event,
            Lock=Lock,
            RLock=Lock,
            Thread=Thread,
            Timer=Timer,
            current_thread=lambda: scheduler().current,
            main_thread=lambda: _MAIN,
            local=threading.local,
            get_ident=lambda: id(scheduler().current),
        ),
    ),
    (time, _Clock()),
    (queue, SimpleNamespace(SimpleQueue=SimpleQueue, Queue=SimpleQueue, Empty=queue.Empty)),
    (concurrent.futures.Future, Future),
    (concurrent.futures.ThreadPoolExecutor, ThreadPoolExecutor),
    (concurrent.futures.wait, wait),
    (crash_points.reach, reach),
    (StateClock, SimulatedStateClock),
)


@contextmanager
def replace_threads(others: Sequence[tuple[str, str, object]]) -> Generator[None]:
    """Have all modules of the product use tasks meanwhile.

    `others` are more that is replaced: module, name and what is found there.
    """
    by_id = {id(real): fake for real, fake in _REPLACED}
    before: list[tuple[object, str, object]] = []
    try:
        for module_name, module in list(sys.modules.items()):
            if not module_name.startswith("onceflow."):
                continue
            for name, value in list(vars(module).items()):
                if id(value) in by_id and module is not crash_points:
                    before.append((module, name, value))
                    setattr(module, name, by_id[id(value)])
        for module_name, name, fake in others:
            module = sys.modules[module_name]
            before.append((module, name, getattr(module, name)))
            setattr(module, name, fake)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
