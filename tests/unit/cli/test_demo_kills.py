"""The demo kills what it was told to, at moments that the seed names, one outage at a time."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest

from onceflow.cli.demo.driver_files import DriverStatus, SlotProcess
from onceflow.cli.demo.killing import Killer, Victims
from onceflow.cli.demo.kills import PlannedKill, plan_kills
from onceflow.cli.demo.settings import DEFAULT_KILLS, DemoSettings, KillKind, choose_kills
from onceflow.core.errors import ConfigError
from onceflow.integration.faults import is_alive, kill_process


@dataclass
class RecordingServer:
    """Counts what is done to it; what a real one does is tested with the servers."""

    calls: list[str] = field(default_factory=list[str])
    pid: int | None = 4

    def kill(self) -> None:
        self.calls.append("kill")

    def start(self) -> None:
        self.calls.append("start")


@dataclass
class RecordingDriver:
    calls: list[str] = field(default_factory=list[str])

    def kill(self) -> tuple[int, ...]:
        self.calls.append("kill")
        return (7, 8)

    def start(self) -> None:
        self.calls.append("start")


@dataclass
class Scene:
    """A killer with its victims, and what it said."""

    kills: tuple[PlannedKill, ...]
    driver: RecordingDriver = field(default_factory=RecordingDriver)
    postgres: RecordingServer = field(default_factory=RecordingServer)
    kafka: RecordingServer = field(default_factory=RecordingServer)
    said: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        victims = Victims(self.driver, self.postgres, self.kafka)
        self.killer = Killer(self.kills, victims, seed=1, say=self.said.append)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a slot."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as process:
        yield process
        kill_process(process.pid)


def _status(
    records_in: int, *, attempt: int = 1, slots: tuple[SlotProcess, ...] = ()
) -> DriverStatus:
    return DriverStatus("running", attempt, records_in, 0, slots)


@pytest.mark.parametrize("seed", range(20))
def test_plan_has_every_kill_once_in_order_and_in_time(seed: int) -> None:
    kinds = choose_kills((), 7)
    plan = plan_kills(kinds, 1_000_000, seed)
    assert Counter(kill.kind for kill in plan) == Counter(kinds)
    moments = [kill.at_records for kill in plan]
    assert moments == sorted(set(moments))
    assert moments[0] >= 50_000
    assert moments[-1] <= 750_000


def test_one_seed_is_one_plan_and_seeds_differ() -> None:
    plans = {seed: plan_kills(DEFAULT_KILLS, 1_000_000, seed) for seed in range(10)}
    assert plans == {seed: plan_kills(DEFAULT_KILLS, 1_000_000, seed) for seed in range(10)}
    assert len(set(plans.values())) == 10
    assert len({tuple(kill.kind for kill in plan) for plan in plans.values()}) > 1


def test_kills_are_the_named_kinds_or_the_default_ones() -> None:
    assert choose_kills((), None) == (KillKind.SLOT, KillKind.WORKER, KillKind.DRIVER)
    assert choose_kills((), 0) == ()
    assert choose_kills((KillKind.KAFKA,), None) == (KillKind.KAFKA,)
    assert choose_kills((KillKind.SLOT, KillKind.DRIVER), 3) == (
        KillKind.SLOT,
        KillKind.DRIVER,
        KillKind.SLOT,
    )
    with pytest.raises(ConfigError, match="-1"):
        choose_kills((), -1)


def test_executor_kill_asks_spark_for_executors_of_their_own() -> None:
    assert DemoSettings().spark_master == "local[2]"
    with_executors = DemoSettings(kills=(KillKind.EXECUTOR,), parallelism=3)
    assert with_executors.spark_master == "local-cluster[3,1,1024]"


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("records", partial(DemoSettings, records=0)),
        ("partitions", partial(DemoSettings, partitions=0)),
        ("parallelism", partial(DemoSettings, parallelism=0)),
        ("interval", partial(DemoSettings, interval_s=0)),
    ],
)
def test_flag_out_of_range_is_refused_by_its_name(
    flag: str, settings: Callable[[], DemoSettings]
) -> None:
    with pytest.raises(ConfigError, match=f"--{flag}"):
        settings()


def test_nothing_is_killed_before_its_moment_or_before_the_driver_has_spoken() -> None:
    scene = Scene((PlannedKill(KillKind.POSTGRES, 100),))
    scene.killer.look(None, 500, 0.0)
    scene.killer.look(_status(99), 0, 0.1)
    assert scene.postgres.calls == []
    assert scene.killer.missed == (KillKind.POSTGRES,)
    scene.killer.look(_status(100), 0, 0.2)
    assert scene.postgres.calls == ["kill", "start"]
    assert not scene.killer.missed
    assert scene.killer.done[0].at_s == pytest.approx(0.2)


def test_progress_of_a_restored_attempt_counts_from_what_it_restored() -> None:
    scene = Scene((PlannedKill(KillKind.KAFKA, 100),))
    scene.killer.look(_status(60, attempt=1), 0, 0.0)
    # The attempt failed for a reason of its own; 50 rows were committed before.
    scene.killer.look(_status(0, attempt=2), 50, 1.0)
    scene.killer.look(_status(49, attempt=2), 50, 2.0)
    assert scene.kafka.calls == []
    scene.killer.look(_status(50, attempt=2), 50, 3.0)
    assert scene.kafka.calls == ["kill", "start"]


def test_second_kill_waits_until_rows_flow_again() -> None:
    scene = Scene((PlannedKill(KillKind.DRIVER, 10), PlannedKill(KillKind.POSTGRES, 20)))
    scene.killer.look(_status(30), 5, 0.0)
    assert scene.driver.calls == ["kill", "start"]
    scene.killer.look(_status(40), 5, 1.0)
    assert scene.postgres.calls == [], "no row has come since the driver died"
    scene.killer.look(_status(40, attempt=2), 6, 3.5)
    assert scene.postgres.calls == ["kill", "start"]
    assert [kill.recovered_s for kill in scene.killer.done] == [3.5, None]
    assert scene.killer.done[0].pids == (7, 8)


def test_slot_kill_ends_the_process_of_a_slot(sleeper: subprocess.Popen[bytes]) -> None:
    scene = Scene((PlannedKill(KillKind.SLOT, 0),))
    scene.killer.look(_status(1), 0, 0.0)
    assert scene.killer.done == [], "there is no slot yet"
    slot = SlotProcess(slot=0, pid=sleeper.pid, parent_pid=1)
    scene.killer.look(_status(1, slots=(slot,)), 0, 0.1)
    assert sleeper.wait(5) == -9
    assert scene.killer.done[0].pids == (sleeper.pid,)


def test_slot_that_is_gone_already_does_not_count_as_killed(
    sleeper: subprocess.Popen[bytes],
) -> None:
    kill_process(sleeper.pid)
    sleeper.wait(5)
    scene = Scene((PlannedKill(KillKind.SLOT, 0),))
    slot = SlotProcess(slot=0, pid=sleeper.pid, parent_pid=1)
    scene.killer.look(_status(1, slots=(slot,)), 0, 0.0)
    assert scene.killer.missed == (KillKind.SLOT,)


def test_worker_kill_ends_the_daemon_and_every_slot_that_it_forked() -> None:
    family = (
        "import subprocess, sys\n"
        "children = [subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])"
        " for _ in range(2)]\n"
        "print(*(child.pid for child in children), flush=True)\n"
        "children[0].wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", family], stdout=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stdout is not None
        pids = [int(pid) for pid in daemon.stdout.readline().split()]
        slots = tuple(SlotProcess(i, pid, daemon.pid) for i, pid in enumerate(pids))
        scene = Scene((PlannedKill(KillKind.WORKER, 0),))
        scene.killer.look(_status(1, slots=slots), 0, 0.0)
        assert not any(is_alive(pid) for pid in (daemon.pid, *pids))
    assert set(scene.killer.done[0].pids) == {daemon.pid, *pids}
