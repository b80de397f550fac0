"""A cluster whose slots are simulated processes, and the modules in which they find it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.simulation_runtime import calls, network
from tests.simulation_runtime.scheduler import Process, Scheduler, do_nothing, scheduler
from tests.simulation_runtime.threads import Event, Future, replace_threads

import onceflow.core.runtime.slot.slot as slot_module
from onceflow.core.errors import OnceflowError, SlotLost
from onceflow.core.runtime.driver.savepoints import AskedSavepoint
from onceflow.core.runtime.slot.context import AttemptPlan
from onceflow.core.traces import VARIABLE


class SimulatedCluster:
    """Starts a process for each slot."""

    is_local = True
    driver_host = "127.0.0.1"

    def __init__(self, run: Scheduler) -> None:
        self._run = run
        self.slots: list[Process] = []

    def check(self, parallelism: int) -> None:
        del parallelism

    def check_alive(self) -> None:
        pass

    def take_signals(self) -> None:
        pass

    def await_slots(self, parallelism: int, timeout_s: float) -> None:
        del parallelism, timeout_s

    def start(self, plan: AttemptPlan, ended: Callable[[OnceflowError], None]) -> RunningSlots:
        slots = RunningSlots(self._run, plan, ended)
        self.slots += slots.processes
        return slots


class RunningSlots:
    """The slots of one attempt."""

    def __init__(
        self, run: Scheduler, plan: AttemptPlan, ended: Callable[[OnceflowError], None]
    ) -> None:
        self._run = run
        self._ended = ended
        self._driver = run.require_alive().process
        self._all_ended = Event()
        self._is_lost = False
        self._left = plan.parallelism
        self._returned: set[int] = set()
        self._errors: dict[int, OnceflowError] = {}
        self.processes: list[Process] = []
        for number in range(plan.parallelism):
            process = Process(run, f"slot {number} of attempt {plan.attempt}")
            self.processes.append(process)
            process.on_end.append(partial(self._on_end, number))
            run.spawn(process, process.name, partial(self._run_slot, plan, number))

    def kill(self) -> None:
        for process in self.processes:
            self._run.condemn(process)

    def join(self, timeout_s: float) -> bool:
        return self._all_ended.wait(timeout_s)

    def _run_slot(self, plan: AttemptPlan, number: int) -> None:
        try:
            slot_module.Slot(plan, number).run()
            self._returned.add(number)
        except OnceflowError as error:
            self._errors[number] = error
        self._run.exit_process()

    def _on_end(self, number: int) -> None:
        self._left -= 1
        if self._driver.is_dead:
            return
        if not self._left:
            self._run.spawn(self._driver, "all slots have ended", self._all_ended.set)
        if number not in self._returned and not self._is_lost:
            self._is_lost = True
            error = self._errors.get(number) or SlotLost(f"slot {number} is lost: it was killed")
            self._run.spawn(self._driver, "a slot is lost", partial(self._tell_later, error))

    def _tell_later(self, error: OnceflowError) -> None:
        # The slots' own words come first.
        self._run.sleep(0.2)
        self._ended(error)


class _Scratch:
    path = Path("/nowhere")

    @staticmethod
    def create(base: Path, name: str) -> _Scratch:
        del base, name
        return _Scratch()

    def delete(self) -> None:
        pass


def _ask_for_savepoint(request: Any, directory: Any) -> AskedSavepoint:
    return AskedSavepoint(request, directory, Future())


def _record_step(path: str, line: bytes) -> None:
    del path
    run = scheduler()
    run.steps_of_protocol.append((run.require_alive().process.name, line))


def _keep(cluster: Any) -> Any:
    return cluster


def _exit_hard(status: int) -> None:
    del status
    scheduler().exit_process()


_RUNTIME = "onceflow.core.runtime"
_OTHERS: Sequence[tuple[str, str, object]] = (
    (f"{_RUNTIME}.driver.attempt_start", "ControlServer", network.ControlServer),
    (f"{_RUNTIME}.transport.credentials", "Credentials", network.Credentials),
    (
        f"{_RUNTIME}.driver.attempt_start",
        "atexit",
        SimpleNamespace(register=do_nothing, unregister=do_nothing),
    ),
    (f"{_RUNTIME}.driver.attempt_start", "bind_thread_fields", do_nothing),
    (f"{_RUNTIME}.driver.driver", "bind_thread_fields", do_nothing),
    (f"{_RUNTIME}.dataflow.subtask", "bind_thread_fields", do_nothing),
    (f"{_RUNTIME}.dataflow.async_operator", "CallLoop", calls.CallLoop),
    (f"{_RUNTIME}.driver.savepoints", "AskedSavepoint", _ask_for_savepoint),
    (f"{_RUNTIME}.slot.slot", "Credentials", network.Credentials),
    (f"{_RUNTIME}.slot.slot", "DataServer", network.DataServer),
    (f"{_RUNTIME}.slot.slot", "ScratchDirectory", _Scratch),
    (f"{_RUNTIME}.slot.slot", "configure_slot_logs", do_nothing),
    (f"{_RUNTIME}.slot.slot", "bind_process_fields", do_nothing),
    (
        f"{_RUNTIME}.slot.slot",
        "gc",
        SimpleNamespace(get_freeze_count=lambda: 1, set_threshold=do_nothing),
    ),
    (f"{_RUNTIME}.slot.slot", "sys", SimpleNamespace(setswitchinterval=do_nothing)),
    (f"{_RUNTIME}.slot.control", "ControlStream", network.ControlStream),
    (f"{_RUNTIME}.slot.control", "FlightChannel", network.FlightChannel),
    (f"{_RUNTIME}.slot.control", "KeepAlive", network.KeepAlive),
    (f"{_RUNTIME}.slot.control", "os", SimpleNamespace(_exit=_exit_hard)),
    (f"{_RUNTIME}.slot.control", "logging", SimpleNamespace(shutdown=do_nothing)),
    (f"{_RUNTIME}.slot.chain_builder", "FlightChannel", network.FlightChannel),
    ("onceflow.core.api.pipeline", "_to_cluster", _keep),
    ("onceflow.core.traces", "_append", _record_step),
)


@contextmanager
def simulate_runtime() -> Generator[None]:
    """Have the product's threads, processes, clocks and streams simulated meanwhile."""
    with pytest.MonkeyPatch.context() as patch, replace_threads(_OTHERS):
        patch.setenv(VARIABLE, "of no file")
        yield
