"""Chaos itself: a wrong job is red, and a fault that never struck fails a run by its name."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.chaos.changes import INITIAL_ROWS, draw_changes
from tests.chaos.clocks import describe_clocks
from tests.chaos.disks import break_disk, describe_disks
from tests.chaos.libraries import build_library, find_compiler, preload
from tests.chaos.limits import Limits
from tests.chaos.machine import Machine
from tests.chaos.model import Record, compare, expect, expect_copy
from tests.chaos.report import ChaosReport, describe_failure, summarize, to_html, to_json
from tests.chaos.run import Outcome, ScheduleRun, SinkVerdict
from tests.chaos.schedule import Fault, FaultKind, Schedule, SinkKind, draw_schedule
from tests.chaos.servers import Servers
from tests.chaos.strikes import Strike

ALL_KINDS = tuple(FaultKind)
SLOT_KILLS = tuple(Fault(FaultKind.SLOTS, "kill", at_s, 0.0, 1) for at_s in (1.0, 4.0))


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers(lambda line: None, with_mysql=False) as started:
        yield started


def small_schedule(seed: int) -> Schedule:
    return replace(
        draw_schedule(seed, ALL_KINDS),
        kinds=(FaultKind.SLOTS,),
        graph="running",
        sinks=(SinkKind.POSTGRES,),
        records=4_000,
        accounts=20,
        partitions=2,
        parallelism=2,
        producing_s=5.0,
        interval_s=0.25,
        unaligned=False,
        faults=SLOT_KILLS,
    )


def run(schedule: Schedule, servers: Servers, directory: Path) -> Outcome:
    name = f"chaos{schedule.seed}"
    return ScheduleRun(schedule, servers, directory, print, name=name).execute()


@pytest.mark.integration
@pytest.mark.servers
@pytest.mark.timeout(300)
def test_job_at_least_once_is_red_with_doubled_rows(servers: Servers, tmp_path: Path) -> None:
    outcome = run(replace(small_schedule(1), at_least_once=True), servers, tmp_path)
    assert not outcome.failure
    assert not outcome.is_exact
    assert outcome.sinks[0].difference.doubled > 0
    assert outcome.sinks[0].difference.found > outcome.sinks[0].difference.expected


@pytest.mark.integration
@pytest.mark.servers
@pytest.mark.timeout(300)
def test_sink_that_forgets_commits_is_red_with_lost_rows(servers: Servers, tmp_path: Path) -> None:
    outcome = run(replace(small_schedule(2), broken=True, faults=()), servers, tmp_path)
    assert not outcome.failure
    assert not outcome.is_exact
    assert outcome.sinks[0].difference.missing > 0
    assert outcome.sinks[0].in_doubt > 0


def make_outcome(*strikes: Strike) -> Outcome:
    return Outcome(
        schedule=small_schedule(7),
        strikes=strikes,
        deaths=Counter(),
        recoveries=1,
        drivers=1,
        gave_up=(),
        seconds=1.0,
    )


@pytest.mark.parametrize("was_delivered", [True, False])
def test_kind_that_never_struck_fails_the_run_by_name(was_delivered: bool) -> None:
    outcome = make_outcome(Strike(SLOT_KILLS[0], was_delivered))
    report = ChaosReport((outcome,), (FaultKind.SLOTS,), 7, 1.0, {})
    assert report.is_ok == was_delivered
    assert ("NEVER DELIVERED: slots" in summarize(report)) != was_delivered


def test_run_until_every_kind_has_struck_goes_on_after_a_fault_without_a_victim() -> None:
    limits = Limits(minutes=4.0, schedules=None, ends_once_all_struck=True)
    kinds = (FaultKind.SLOTS,)
    missed = make_outcome(Strike(SLOT_KILLS[0], was_delivered=False))
    struck = make_outcome(Strike(SLOT_KILLS[0], was_delivered=True))
    assert not limits.are_reached([], kinds, 0.0)
    assert not limits.are_reached([missed], kinds, 200.0)
    assert limits.are_reached([missed], kinds, 241.0)
    assert limits.are_reached([missed, struck], kinds, 100.0)
    assert limits.choose_kinds([struck], ALL_KINDS) == ALL_KINDS[1:]
    to_the_end = replace(limits, ends_once_all_struck=False)
    assert to_the_end.choose_kinds([struck], ALL_KINDS) == ALL_KINDS
    assert not to_the_end.are_reached([missed, struck], kinds, 100.0)


def test_kind_that_cannot_run_here_is_named_and_has_a_status_of_its_own() -> None:
    outcome = make_outcome(Strike(SLOT_KILLS[0], was_delivered=True))
    whole = ChaosReport((outcome,), (FaultKind.SLOTS,), 7, 1.0, {})
    part = replace(whole, not_run={FaultKind.DISK: "mounting needs root"})
    red = replace(part, outcomes=(replace(outcome, failure="it hangs"),))
    missed = replace(part, kinds=(FaultKind.SLOTS, FaultKind.DRIVER))
    assert [report.exit_status for report in (whole, part, red, missed)] == [0, 3, 1, 4]
    assert "NOT RUN: disk: mounting needs root" in summarize(part)
    assert "mounting needs root" in to_html(part)
    assert to_json(part)["not_run"] == {"disk": "mounting needs root"}


def test_machine_without_abilities_replaces_the_faults_that_need_them() -> None:
    faults = (
        Fault(FaultKind.STORAGE, "full", 1.0, 1.0, 1),
        Fault(FaultKind.DISK, "scratch failing", 2.0, 1.0, 1),
        Fault(FaultKind.HOSTS, "worker-1 reorder", 3.0, 1.0, 1),
    )
    schedule = replace(small_schedule(1), faults=faults)
    refused = Machine({FaultKind.DISK: "mounting needs root"})
    assert [fault.variant for fault in refused.adapt(schedule).faults] == [
        "fails",
        "scratch read-only",
        "worker-1 delay",
    ]
    able = Machine(libraries=(Path("library.so"),), has_netem=True)
    assert able.adapt(schedule) == schedule
    assert refused.choose(ALL_KINDS) == tuple(k for k in ALL_KINDS if k is not FaultKind.DISK)


def build(name: str, directory: Path) -> Path:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler (cc)")
    return build_library(compiler, name, directory)


def test_library_lets_writes_below_one_directory_fail_and_no_others(tmp_path: Path) -> None:
    library = build("failing_disk", tmp_path)
    for folder in ("disk", "scratch"):
        (tmp_path / folder).mkdir()
    heal = break_disk(tmp_path, "scratch", "failing", 1)
    program = (
        "import os, sys\n"
        "for folder in ('disk', 'scratch'):\n"
        "    try:\n"
        "        os.write(os.open(f'{sys.argv[1]}/{folder}/a', os.O_CREAT | os.O_WRONLY), b'1')\n"
        "        print(folder, 'works')\n"
        "    except OSError as error:\n"
        "        print(folder, error.errno)\n"
    )
    environment = {**preload([library]), **describe_disks(tmp_path)}
    output = run_python(program, environment, tmp_path)
    assert output.split("\n")[:2] == ["disk works", f"scratch {errno.EIO}"]
    assert heal()
    assert "scratch works" in run_python(program, environment, tmp_path)


@pytest.mark.parametrize("offset_s", [3_600, -3_600])
def test_library_moves_the_wall_clock_and_keeps_the_length_of_waits(
    tmp_path: Path, offset_s: int
) -> None:
    library = build("jumping_clock", tmp_path)
    environment = {**preload([library]), **describe_clocks(tmp_path)}
    program = (
        "import os, sys, threading, time\n"
        "from pathlib import Path\n"
        "before, steady = time.time(), time.monotonic()\n"
        "Path(sys.argv[1], 'clocks', str(os.getpid())).write_text(sys.argv[2])\n"
        "moved_s = time.time() - before\n"
        "from confluent_kafka import Consumer\n"
        "settings = {'bootstrap.servers': '127.0.0.1:1', 'group.id': 'g', 'log_level': 0}\n"
        "consumer = Consumer(settings)\n"
        "consumer.subscribe(['t'])\n"
        "consumer.poll(0.2)\n"
        "threading.Event().wait(0.2)\n"
        "print(moved_s, time.monotonic() - steady)\n"
    )
    moved_s, took_s = map(float, run_python(program, environment, tmp_path, offset_s).split())
    assert moved_s == pytest.approx(offset_s, abs=20)
    assert 0.4 <= took_s < 20


def run_python(program: str, environment: dict[str, str], *arguments: object) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    return ended.stdout


def test_red_schedule_names_the_command_that_repeats_it() -> None:
    outcome = replace(make_outcome(Strike(SLOT_KILLS[0], was_delivered=True)), failure="it hangs")
    report = ChaosReport((outcome,), (FaultKind.SLOTS,), 7, 1.0, {7: "/kept/logs"})
    command = "script/chaos --schedules 1 --seed 7 --kinds slots"
    assert not report.is_ok
    for page in (summarize(report), to_html(report)):
        assert command in page
        assert "it hangs" in page


def test_one_seed_draws_one_schedule_and_three_seeds_draw_every_kind() -> None:
    assert draw_schedule(3, ALL_KINDS) == draw_schedule(3, ALL_KINDS)
    for first in range(50):
        drawn = [draw_schedule(seed, ALL_KINDS) for seed in range(first, first + 3)]
        assert {fault.kind for schedule in drawn for fault in schedule.faults} == set(ALL_KINDS)


def test_model_tells_lost_doubled_and_foreign_rows_apart() -> None:
    records = [Record(id=n, account="a", amount=n, ts=n) for n in range(3)]
    expected, _ = expect("running", [records])
    first, second, third = sorted(expected.rows)
    found = Counter({first: 2, second: 1, ("foreign",): 1})
    difference = compare(expected, found)
    assert (difference.missing, difference.doubled, difference.unexpected) == (1, 1, 1)
    assert str(third) in difference.examples[0]
    assert compare(expected, expected.rows).is_exact
    assert "1 rows lost, 1 doubled, 1 never expected" in describe_failure(
        replace(make_outcome(), sinks=(SinkVerdict(SinkKind.POSTGRES, difference, 0),))
    )


def test_model_of_a_copied_table_counts_each_change_and_keeps_the_last_row_of_a_key() -> None:
    schedule = replace(small_schedule(5), graph="changes", records=2_000)
    changes = draw_changes(schedule)
    copy, each = expect_copy(changes)
    assert len(changes) == each.rows.total() == INITIAL_ROWS + schedule.records
    last = {change.record.id: change for change in changes}
    kept = [change.record for change in last.values() if change.operation != "d"]
    assert len(kept) < len(last)
    assert copy.rows == Counter((row.id, row.account, row.amount, row.ts) for row in kept)
    twice = each.rows + Counter([("c", *copy.rows.most_common(1)[0][0])])
    assert not compare(each, twice).is_exact
