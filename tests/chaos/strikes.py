"""Strikes with the faults of a schedule at their moments, heals them, and counts what was real.

A fault counts as delivered only if its victim was there and was hit: a process that died, a server
that stopped, a call of storage that failed, a crash point at which a process killed itself.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.chaos.clocks import move_clocks
from tests.chaos.disks import break_disk, fill_disk, to_condition
from tests.chaos.drivers import Drivers, SavepointStop
from tests.chaos.hosts import Hosts, break_cable
from tests.chaos.schedule import PARALLELISM_MAX, REACHABLE_POINTS, Fault, FaultKind
from tests.chaos.servers import AnyServer
from tests.support.failing_once import FailingOnceStorage
from typing_extensions import assert_never

from onceflow.integration.faults import processes

_RETRY_S = 0.3
"""The wait for a victim that is not there at the moment, such as a slot between two attempts."""
_TRIES_MAX = 400
"""Two minutes: a driver with a new Spark session needs one of them on a busy machine."""
_STOPS_MAX = 3
"""A savepoint that other faults prevent is asked for again."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that is over."""

    fault: Fault
    was_delivered: bool


@dataclass(slots=True)
class _Pending:
    fault: Fault
    due_s: float
    tries: int = 0


@dataclass(frozen=True, slots=True)
class _Active:
    """A fault that has struck. It is healed at `due_s` if it is over then."""

    fault: Fault
    due_s: float
    heal: Callable[[], bool]
    """Heals the fault and returns True if it was delivered."""
    is_over: Callable[[], bool] = lambda: True


class Faults:
    """All faults of one schedule. Used by one thread, which calls `look` again and again."""

    def __init__(
        self,
        faults: tuple[Fault, ...],
        servers: Mapping[str, AnyServer],
        drivers: Drivers,
        directory: Path,
        say: Callable[[str], None],
        hosts: Hosts | None = None,
    ) -> None:
        """Take the plan. `directory` is that of the schedule.

        `hosts` are None if driver and slots are processes of this host.
        """
        self._pending = [_Pending(fault, fault.at_s) for fault in faults]
        self._active: list[_Active] = []
        self._servers = servers
        self._drivers = drivers
        self._directory = directory
        self._say = say
        self._hosts = hosts
        self._points = directory / "points"
        self._deaths = directory / "deaths"
        for folder in (self._points, self._deaths):
            folder.mkdir()
        self._stop: SavepointStop | None = None
        self._stops_left = _STOPS_MAX
        self.strikes: list[Strike] = []

    @property
    def are_over(self) -> bool:
        """True if every fault has struck and is healed."""
        return not self._pending and not self._active

    @property
    def is_moving(self) -> bool:
        """True while a savepoint is taken: the driver that ends in it is not started again."""
        return self._stop is not None

    def count_deaths(self) -> Counter[str]:
        """Return the deaths at each crash point so far."""
        return Counter(path.name.partition(".")[0] for path in self._deaths.iterdir())

    def look(self, now_s: float) -> None:
        """Strike and heal what is due, `now_s` seconds after the first record."""
        for active in [a for a in self._active if a.due_s <= now_s and a.is_over()]:
            self._active.remove(active)
            self._note(active.fault, was_delivered=active.heal())
        for pending in [p for p in self._pending if p.due_s <= now_s]:
            self._pending.remove(pending)
            heal = self._strike(pending.fault)
            if heal is not None:
                self._say(f"{now_s:6.1f} s  {pending.fault}")
                self._active.append(replace(heal, due_s=now_s + pending.fault.lasts_s))
            elif pending.tries < _TRIES_MAX:
                self._pending.append(_Pending(pending.fault, now_s + _RETRY_S, pending.tries + 1))
            else:
                self._note(pending.fault, was_delivered=False)

    def end(self) -> None:
        """Heal what still lasts, disarm every crash point, and have all servers run."""
        for active in self._active:
            self._note(active.fault, was_delivered=active.heal())
        self._active.clear()
        for path in self._points.iterdir():
            path.unlink(missing_ok=True)
        for server in self._servers.values():
            server.network.heal()
            if server.running:
                server.unpause()
            else:
                server.start()

    def _note(self, fault: Fault, *, was_delivered: bool) -> None:
        if not was_delivered:
            self._say(f"          not delivered: {fault}")
        self.strikes.append(Strike(fault, was_delivered))

    def _strike(self, fault: Fault) -> _Active | None:
        """Strike. Return the healing, or None if there is no victim now."""
        match fault.kind:
            case FaultKind.SLOTS:
                return self._signal_slot(fault, signal.SIGKILL)
            case FaultKind.DRIVER:
                return self._active_if(fault, self._drivers.kill())
            case FaultKind.TWO_DRIVERS:
                return self._start_second_driver(fault)
            case FaultKind.DATABASE | FaultKind.BROKER:
                return self._kill_server(fault)
            case FaultKind.NETWORK:
                return self._break_network(fault)
            case FaultKind.FROZEN:
                return self._freeze(fault)
            case FaultKind.STORAGE:
                return self._break_storage(fault)
            case FaultKind.DISK:
                return self._break_disk(fault)
            case FaultKind.CLOCK:
                return self._move_clocks(fault)
            case FaultKind.HOSTS:
                return self._break_cable(fault)
            case FaultKind.POINTS:
                return self._arm(fault, fault.variant.split(" "))
            case FaultKind.SAVEPOINT:
                return self._stop_with_savepoint(fault)
            case _:
                assert_never(fault.kind)

    def _active_if(self, fault: Fault, was_delivered: bool) -> _Active | None:
        return _Active(fault, 0.0, lambda: True) if was_delivered else None

    def _signal_slot(self, fault: Fault, number: signal.Signals) -> _Active | None:
        slots = self._drivers.find_slots()
        if not slots:
            return None
        pid = slots[fault.draw % len(slots)]
        if number is signal.SIGKILL:
            return self._active_if(fault, processes.kill_process(pid))
        return self._freeze_process(fault, pid)

    def _freeze_process(self, fault: Fault, pid: int) -> _Active | None:
        if not processes.signal_process(pid, signal.SIGSTOP):
            return None
        deadline = time.monotonic() + 1.0
        while not (was_paused := processes.is_paused(pid)) and time.monotonic() < deadline:
            time.sleep(0.01)

        def thaw() -> bool:
            processes.signal_process(pid, signal.SIGCONT)
            return was_paused

        return _Active(fault, 0.0, thaw)

    def _start_second_driver(self, fault: Fault) -> _Active | None:
        if self.is_moving or not self._is_job_running():
            return None
        if fault.variant == "beside a living one":
            self._drivers.start()
            return _Active(fault, 0.0, lambda: True)
        if fault.variant == "both killed":
            first = self._drivers.last
            self._drivers.start()

            def kill_both() -> bool:
                was_second_killed = self._drivers.kill()
                if first.is_running:
                    first.kill()
                return was_second_killed

            return _Active(fault, 0.0, kill_both)
        pid = self._drivers.freeze()
        if pid is None:
            return None
        frozen = self._freeze_process(fault, pid)
        self._drivers.start()
        return frozen

    def _kill_server(self, fault: Fault) -> _Active | None:
        server = self._servers[fault.variant]
        if not server.running:
            return None
        server.kill()

        def start() -> bool:
            # A broker is ready only when it answers through its proxy.
            server.network.heal()
            server.start()
            return True

        return _Active(fault, 0.0, start)

    def _break_network(self, fault: Fault) -> _Active | None:
        name, _, action = fault.variant.partition(" ")
        network = self._servers[name].network
        if network.connection_count == 0:
            return None
        match action:
            case "cut":
                network.cut()
            case "refuse":
                network.refuse()
            case "pause":
                network.pause()
            case _:
                network.delay(0.05 + fault.draw / 5_000)

        def heal() -> bool:
            network.heal()
            return True

        return _Active(fault, 0.0, heal)

    def _freeze(self, fault: Fault) -> _Active | None:
        if fault.variant == "slot":
            return self._signal_slot(fault, signal.SIGSTOP)
        if fault.variant == "driver":
            pid = self._drivers.freeze()
            return None if pid is None else self._freeze_process(fault, pid)
        server = self._servers[fault.variant]
        if not server.running:
            return None
        server.pause()

        def thaw() -> bool:
            if server.running:
                server.unpause()
            return True

        return _Active(fault, 0.0, thaw)

    def _arm(self, fault: Fault, points: Sequence[str]) -> _Active | None:
        if not self._is_job_running():
            return None
        armed = [self._points / point for point in points]
        for path in armed:
            path.touch()

        def disarm() -> bool:
            was_reached = not all(path.exists() for path in armed)
            for path in armed:
                path.unlink(missing_ok=True)
            return was_reached

        return _Active(fault, 0.0, disarm)

    def _is_job_running(self) -> bool:
        status = self._drivers.look()
        is_running = status is not None and status.state == "running"
        return is_running and self._drivers.last.is_running

    @property
    def _is_disk_broken(self) -> bool:
        """True while a fault of a disk lasts. One at a time: each one writes to the disk itself."""
        return any(
            a.fault.kind is FaultKind.DISK or a.fault.variant == "full" for a in self._active
        )

    def _break_storage(self, fault: Fault) -> _Active | None:
        if not self._is_job_running() or (fault.variant == "full" and self._is_disk_broken):
            return None
        return self._fill_disk(fault) if fault.variant == "full" else self._fail_calls(fault)

    def _fail_calls(self, fault: Fault) -> _Active:
        spec = self._drivers.spec
        storage = FailingOnceStorage(spec.storage, faults=spec.failing_calls)
        rng = random.Random(fault.draw)
        for _ in range(rng.randint(1, 4)):
            call = rng.choice(("create", "create", "write", "write", "delete", "read", "list"))
            storage.fail(call, ".", after=rng.random() < 0.5)
        armed = len(storage.list_due())

        def heal() -> bool:
            due = storage.list_due()
            for name in due:
                (Path(spec.failing_calls) / name).unlink(missing_ok=True)
            return len(due) < armed

        return _Active(fault, 0.0, heal)

    def _fill_disk(self, fault: Fault) -> _Active:
        return _Active(fault, 0.0, fill_disk(self._directory, "checkpoints", fault.draw))

    def _break_disk(self, fault: Fault) -> _Active | None:
        if not self._is_job_running() or self._is_disk_broken:
            return None
        disk, _, condition = fault.variant.partition(" ")
        heal = break_disk(self._directory, disk, to_condition(condition), fault.draw)
        return _Active(fault, 0.0, heal)

    def _break_cable(self, fault: Fault) -> _Active | None:
        name, _, action = fault.variant.partition(" ")
        others = (active.fault for active in self._active)
        is_broken = any(o.kind is FaultKind.HOSTS and o.variant.startswith(name) for o in others)
        if self._hosts is None or is_broken or not self._is_job_running():
            return None
        host = self._hosts.by_name[name]
        heal = break_cable(host, action, has_netem=self._hosts.has_netem)
        return _Active(fault, 0.0, heal)

    def _move_clocks(self, fault: Fault) -> _Active | None:
        others = any(active.fault.kind is FaultKind.CLOCK for active in self._active)
        slots = self._drivers.find_slots()
        if others or not slots or not self._is_job_running():
            return None
        victims, _, offset_s = fault.variant.partition(" ")
        pids = {
            "driver": [self._drivers.last.pid],
            "slot": [slots[fault.draw % len(slots)]],
            "all": [self._drivers.last.pid, *slots],
        }[victims]
        return _Active(fault, 0.0, move_clocks(self._directory, pids, int(offset_s)))

    def _stop_with_savepoint(self, fault: Fault) -> _Active | None:
        status = self._drivers.look()
        has_checkpoint = status is not None and status.checkpoints > 0
        if self.is_moving or not has_checkpoint or not self._is_job_running():
            return None
        if fault.variant in REACHABLE_POINTS and not self._has_died_at(fault.variant):
            (self._points / fault.variant).touch()
        stop = self._stop = SavepointStop(self._drivers.spec, self._directory, self._drivers.prefix)
        driver = self._drivers.last

        def move_once_stopped() -> bool:
            """Return True if the savepoint failed, or a driver that began from it runs."""
            if stop.is_running:
                return False
            savepoint = stop.find_savepoint()
            if savepoint is None:
                return True
            if self.is_moving and not driver.is_running:
                self._stop = None
                self._move(savepoint, fault)
            # Crash points at the start from a savepoint stay armed until the job runs again.
            return self._drivers.last is not driver and self._is_job_running()

        def end() -> bool:
            stop.end()
            if not self.is_moving:
                return True
            self._stop = None
            self._stops_left -= 1
            if self._stops_left:
                self._pending.append(_Pending(fault, 0.0))
            return False

        return _Active(fault, 0.0, end, move_once_stopped)

    def _has_died_at(self, point: str) -> bool:
        return self.count_deaths()[point] > 0

    def _move(self, savepoint: str, fault: Fault) -> None:
        """Have the next driver start from `savepoint` with other slots and the other backend."""
        spec = self._drivers.spec
        self._drivers.spec = replace(
            spec,
            from_savepoint=savepoint,
            parallelism=spec.parallelism % PARALLELISM_MAX + 1,
            backend="heap" if spec.backend == "rocksdb" else "rocksdb",
            storage=f"{spec.storage}-moved" if fault.draw % 2 else spec.storage,
        )
