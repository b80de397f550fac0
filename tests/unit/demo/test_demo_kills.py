"""The demo kills what it was told to, at moments that the seed names, one outage at a time."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
from demo.driver import DriverStatus, SlotProcess
from demo.kills import Killer, PlannedKill, Progress, Victims, plan_kills
from demo.settings import (
    DEFAULT_KILLS,
    DemoCommitMode,
    DemoSettings,
    KillKind,
    SinkKind,
    choose_kills,
)

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
    records_until_over: int = 1000
    driver: RecordingDriver = field(default_factory=RecordingDriver)
    postgres: RecordingServer = field(default_factory=RecordingServer)
    kafka: RecordingServer = field(default_factory=RecordingServer)
    said: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        servers = {KillKind.POSTGRES: self.postgres, KillKind.KAFKA: self.kafka}
        victims = Victims(self.driver, servers)
        self.killer = Killer(
            self.kills,
            victims,
            records=1000,
            records_until_over=self.records_until_over,
            seed=1,
            say=self.said.append,
        )

    def look(
        self,
        now_s: float,
        records_in: int,
        committed: int = 0,
        *,
        attempt: int = 1,
        state: str = "running",
        slots: tuple[SlotProcess, ...] = (),
    ) -> None:
        status = DriverStatus(state, attempt, records_in, 0, slots)
        self.killer.look(Progress(status, committed, visible_rows=committed, now_s=now_s))


def _at(kind: KillKind, records: int) -> PlannedKill:
    """A kill that comes as soon as so many records are read."""
    return _plan(kind, 0, records, records)


def _plan(
    kind: KillKind, commit: int, strike: int, end: int, *, delay_s: float = 0.0
) -> PlannedKill:
    return PlannedKill(
        kind,
        commit_records=commit,
        strike_records=strike,
        delay_s=delay_s,
        end_records=end,
        reserve_records=end + 5,
    )


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a slot."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as process:
        yield process
        kill_process(process.pid)


@pytest.mark.parametrize("seed", range(20))
def test_plan_has_every_kill_once_in_order_and_in_time(seed: int) -> None:
    kinds = choose_kills((), 7)
    plan = plan_kills(kinds, 1_000_000, seed, interval_s=0.5)
    assert Counter(kill.kind for kill in plan) == Counter(kinds)
    bounds = [
        bound
        for kill in plan
        for bound in (
            kill.commit_records,
            kill.strike_records,
            kill.end_records,
            kill.reserve_records,
        )
    ]
    assert bounds == sorted(set(bounds)), "commit, strike, end, reserve, then the next kill"
    assert bounds[0] > 0
    assert bounds[-1] < 1_000_000, "something is left to read after the last kill"
    assert all(0 <= kill.delay_s <= 0.3 for kill in plan)


def test_one_seed_is_one_plan_and_seeds_differ() -> None:
    plans = {seed: plan_kills(DEFAULT_KILLS, 1_000_000, seed, interval_s=1) for seed in range(10)}
    assert plans == {
        seed: plan_kills(DEFAULT_KILLS, 1_000_000, seed, interval_s=1) for seed in range(10)
    }
    assert len(set(plans.values())) == 10
    assert len({tuple(kill.kind for kill in kills) for kills in plans.values()}) > 1


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


@pytest.mark.parametrize("sink", list(SinkKind))
@pytest.mark.parametrize("kill", [KillKind.POSTGRES, KillKind.MYSQL, KillKind.MARIADB])
def test_database_that_is_not_the_sink_cannot_be_killed(sink: SinkKind, kill: KillKind) -> None:
    if kill.value == sink.value:
        assert DemoSettings(sink=sink, kills=(kill,)).kills == (kill,)
        return
    with pytest.raises(ConfigError, match=f"--kill {kill.value} needs --sink {kill.value}"):
        DemoSettings(sink=sink, kills=(kill,))


@pytest.mark.parametrize("sink", list(SinkKind))
def test_broker_can_be_killed_with_every_sink(sink: SinkKind) -> None:
    assert DemoSettings(sink=sink, kills=(KillKind.KAFKA,)).kills == (KillKind.KAFKA,)


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        ("--sink kafka", partial(DemoSettings, sink=SinkKind.KAFKA)),
        ("--at-least-once", partial(DemoSettings, at_least_once=True)),
    ],
)
def test_commit_mode_that_would_be_ignored_is_refused(
    reason: str, settings: Callable[..., DemoSettings]
) -> None:
    with pytest.raises(ConfigError, match=f"leave it out with {reason}"):
        settings(commit_mode=DemoCommitMode.LEDGER)


def test_nothing_is_killed_before_its_moment_or_before_the_driver_has_spoken() -> None:
    scene = Scene((_at(KillKind.POSTGRES, 100),))
    scene.killer.look(Progress(None, committed_records=500, visible_rows=500, now_s=0.0))
    scene.look(0.1, 99)
    assert scene.postgres.calls == []
    assert not scene.killer.finished
    scene.look(0.2, 100)
    assert scene.postgres.calls == ["kill", "start"]
    assert scene.killer.done[0].at_s == pytest.approx(0.2)


def test_kill_comes_its_delay_after_the_strike() -> None:
    scene = Scene((_plan(KillKind.KAFKA, 10, 50, 100, delay_s=0.4),))
    scene.look(1.0, 49)
    scene.look(2.0, 50)
    scene.look(2.39, 90)
    assert scene.kafka.calls == []
    scene.look(2.41, 100)
    assert scene.kafka.calls == ["kill", "start"]


def test_stream_is_held_for_a_commit_and_then_for_the_kill() -> None:
    plan = (
        _plan(KillKind.DRIVER, 10, 50, 100),
        _plan(KillKind.KAFKA, 110, 150, 200),
    )
    scene = Scene(plan)
    released: list[int] = [scene.killer.released_records]
    for now_s, records_in, committed, attempt in (
        (1.0, 10, 0, 1),  # read, and not yet committed
        (2.0, 10, 10, 1),  # committed: the part may flow
        (3.0, 70, 10, 1),  # struck: the next part's first records may flow
        (6.0, 5, 10, 2),
        (7.0, 100, 110, 2),
        (8.0, 160, 110, 2),  # struck: everything may flow
    ):
        scene.look(now_s, records_in, committed, attempt=attempt)
        released.append(scene.killer.released_records)
    assert released == [10, 10, 100, 110, 110, 200, 1000]
    assert [kill.committed_records for kill in scene.killer.done] == [10, 110]


def test_kill_waits_for_records_in_flight_as_long_as_there_are_any() -> None:
    scene = Scene((_plan(KillKind.KAFKA, 10, 50, 100),))
    scene.look(1.0, 100, 100)
    assert scene.kafka.calls == [], "all is committed: nothing would be lost"
    assert scene.killer.released_records == 105
    scene.look(2.0, 103, 100)
    assert scene.kafka.calls == ["kill", "start"]
    scene = Scene((_plan(KillKind.KAFKA, 10, 50, 100),))
    scene.look(1.0, 100, 100)
    scene.look(2.0, 105, 105)
    assert scene.kafka.calls == ["kill", "start"], "the reserve is committed too: no more waiting"


def test_nothing_is_held_when_nothing_is_to_be_killed() -> None:
    scene = Scene(())
    assert scene.killer.released_records == 1000
    assert scene.killer.finished


def test_progress_of_a_restored_attempt_counts_from_what_was_committed() -> None:
    scene = Scene((_at(KillKind.KAFKA, 100),))
    scene.look(0.0, 60)
    # The attempt failed for a reason of its own; 50 records were committed before.
    scene.look(1.0, 0, 50, attempt=2)
    scene.look(2.0, 49, 50, attempt=2)
    assert scene.kafka.calls == []
    scene.look(3.0, 50, 50, attempt=2)
    assert scene.kafka.calls == ["kill", "start"]


def test_second_kill_waits_until_records_flow_in_a_new_attempt() -> None:
    scene = Scene((_at(KillKind.DRIVER, 10), _plan(KillKind.POSTGRES, 60, 20, 90)))
    scene.look(0.0, 30, 5)
    assert scene.driver.calls == ["kill", "start"]
    scene.killer.look(Progress(None, committed_records=5, visible_rows=5, now_s=1.0))
    scene.look(2.0, 0, 50, attempt=2)
    assert scene.postgres.calls == [], "the new attempt has read nothing yet"
    scene.look(3.5, 1, 50, attempt=2)
    assert scene.postgres.calls == ["kill", "start"]
    assert [kill.recovered_s for kill in scene.killer.done] == [3.5, None]
    assert scene.killer.done[0].pids == (7, 8)
    assert [kill.at_records for kill in scene.killer.done] == [30, 51]


def test_slot_kill_is_not_recovered_by_what_its_own_attempt_still_reports(
    sleeper: subprocess.Popen[bytes],
) -> None:
    scene = Scene((_at(KillKind.SLOT, 10), _at(KillKind.KAFKA, 10)))
    slot = SlotProcess(slot=0, pid=sleeper.pid, parent_pid=1)
    scene.look(0.0, 10, slots=(slot,))
    # The driver has not noticed; the checkpoint before the kill has been published meanwhile.
    scene.look(0.1, 12, 10, slots=(slot,))
    assert scene.kafka.calls == []
    scene.look(4.0, 1, 10, attempt=2)
    assert scene.kafka.calls == ["kill", "start"]


def test_server_that_came_back_without_a_new_attempt_counts_as_recovered() -> None:
    scene = Scene((_at(KillKind.KAFKA, 10), _at(KillKind.POSTGRES, 10)))
    scene.look(0.0, 10, 5)
    scene.look(1.0, 12, 5)
    assert scene.postgres.calls == []
    scene.look(2.0, 14, 6)
    assert scene.killer.done[0].recovered_s == pytest.approx(2.0)
    assert scene.postgres.calls == ["kill", "start"]


def test_job_that_has_nothing_left_to_read_has_recovered_once_it_runs() -> None:
    scene = Scene((_at(KillKind.DRIVER, 995),))
    scene.look(0.0, 1000, 1000)
    scene.look(3.0, 0, 1000, attempt=2, state="starting")
    assert not scene.killer.finished
    scene.look(4.0, 0, 1000, attempt=2)
    assert scene.killer.finished


def test_job_that_has_read_all_that_there_is_before_the_move_has_recovered_once_it_runs() -> None:
    scene = Scene((_at(KillKind.DRIVER, 600),), records_until_over=700)
    scene.look(0.0, 700, 700)
    scene.look(3.0, 0, 700, attempt=2, state="starting")
    assert not scene.killer.finished
    scene.look(4.0, 0, 700, attempt=2)
    assert scene.killer.finished


def test_slot_kill_ends_the_process_of_a_slot(sleeper: subprocess.Popen[bytes]) -> None:
    scene = Scene((_at(KillKind.SLOT, 0),))
    scene.look(0.0, 1)
    assert scene.killer.done == [], "there is no slot yet"
    slot = SlotProcess(slot=0, pid=sleeper.pid, parent_pid=1)
    scene.look(0.1, 1, slots=(slot,))
    assert sleeper.wait(60) == -9
    assert scene.killer.done[0].pids == (sleeper.pid,)


def test_slot_that_is_gone_already_does_not_count_as_killed(
    sleeper: subprocess.Popen[bytes],
) -> None:
    kill_process(sleeper.pid)
    sleeper.wait(60)
    scene = Scene((_at(KillKind.SLOT, 0),))
    slot = SlotProcess(slot=0, pid=sleeper.pid, parent_pid=1)
    scene.look(0.0, 1, slots=(slot,))
    assert scene.killer.done == []


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
        scene = Scene((_at(KillKind.WORKER, 0),))
        scene.look(0.0, 1, slots=slots)
        assert not any(is_alive(pid) for pid in (daemon.pid, *pids))
    assert set(scene.killer.done[0].pids) == {daemon.pid, *pids}


def test_executor_kill_ends_the_parent_of_the_daemon(sleeper: subprocess.Popen[bytes]) -> None:
    """The executor's JVM forks the daemon, which forks the slots."""
    jvm = "import subprocess, sys\nsubprocess.run([sys.executable, '-S', '-c', sys.argv[1]])\n"
    daemon = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", jvm, daemon], stdout=subprocess.PIPE, text=True
    ) as executor:
        assert executor.stdout is not None
        daemon_pid = int(executor.stdout.readline())
        scene = Scene((_at(KillKind.EXECUTOR, 0),))
        scene.look(0.0, 1, slots=(SlotProcess(0, sleeper.pid, daemon_pid),))
        assert executor.wait(60) == -9
        kill_process(daemon_pid)
    assert scene.killer.done[0].pids == (executor.pid,)
