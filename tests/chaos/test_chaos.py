"""Chaos itself: a wrong job is red, and a fault that never struck fails a run by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.chaos.limits import Limits
from tests.chaos.model import Record, compare, expect
from tests.chaos.report import ChaosReport, describe_failure, summarize, to_html
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
    to_the_end = replace(limits, ends_once_all_struck=False)
    assert not to_the_end.are_reached([missed, struck], kinds, 100.0)


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
