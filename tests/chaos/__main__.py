"""The command behind script/chaos."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.limits import Limits
from tests.chaos.machine import enter_namespaces, examine_machine
from tests.chaos.report import ChaosReport, describe_failure, summarize, to_html, to_json
from tests.chaos.run import Outcome, ScheduleRun
from tests.chaos.schedule import FaultKind, draw_schedule
from tests.chaos.servers import Servers
from tests.support.servers.database_packages import offer_packages

_DEFAULT_MINUTES = 3.0


def main() -> int:
    """Run schedules until the time is over. Return the exit status that the help describes."""
    arguments = _parse()
    kinds = _parse_kinds(arguments.kinds)
    offer_packages()
    enter_namespaces(kinds)
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    minutes = arguments.minutes
    if arguments.hours is not None:
        minutes = 60 * arguments.hours
    elif minutes is None and arguments.schedules is None:
        minutes = _DEFAULT_MINUTES
    limits = Limits(minutes, arguments.schedules, ends_once_all_struck=arguments.every_kind)
    report = _run(kinds, seed, limits)
    _say(summarize(report))
    if arguments.report:
        Path(arguments.report).write_text(to_html(report), encoding="utf-8")
    if arguments.json:
        sys.stdout.write(json.dumps(to_json(report)) + "\n")
    return report.exit_status


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="script/chaos",
        description="Runs whole jobs on real servers under random faults, and compares every sink"
        " with a model of the input. Exit status 0: all were exact, and every kind has struck."
        " 3: the same, but kinds that cannot run here were left out. 4: all were exact, but a kind"
        " never struck. 1: all other cases.",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="begin no schedule after M minutes (default: 3); three schedules have all kinds",
    )
    length.add_argument("--hours", type=float, metavar="H", help="the same in hours")
    length.add_argument("--schedules", type=int, metavar="N", help="run N schedules")
    parser.add_argument(
        "--every-kind", action="store_true", help="end earlier: once every kind has struck"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the first schedule")
    parser.add_argument(
        "--kinds",
        default=",".join(kind.value for kind in FaultKind),
        help="the kinds of faults, separated by commas (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one object on stdout")
    parser.add_argument("--report", metavar="FILE.html", help="write the report as a page")
    return parser.parse_args()


def _parse_kinds(text: str) -> tuple[FaultKind, ...]:
    try:
        return tuple(dict.fromkeys(FaultKind(name.strip()) for name in text.split(",")))
    except ValueError as error:
        known = ", ".join(kind.value for kind in FaultKind)
        raise SystemExit(f"script/chaos: --kinds {text}: {error}; there are {known}") from error


def _run(kinds: tuple[FaultKind, ...], seed: int, limits: Limits) -> ChaosReport:
    began = time.monotonic()
    outcomes: list[Outcome] = []
    logs: dict[int, str] = {}
    directory = Path(tempfile.mkdtemp(prefix="onceflow-chaos-"))
    machine = examine_machine(directory)
    for kind in kinds:
        if reason := machine.missing.get(kind):
            _say(f"{kind.value} cannot run here: {reason}")
    for remark in machine.remarks:
        _say(remark)
    asked, kinds = kinds, machine.choose(kinds)
    _say(f"chaos from seed {seed} in {directory}")
    with Servers(_say) as servers:
        while kinds and not limits.are_reached(outcomes, kinds, time.monotonic() - began):
            schedule = draw_schedule(
                seed + len(outcomes),
                limits.choose_kinds(outcomes, kinds),
                has_mysql=servers.has_mysql,
            )
            schedule = machine.adapt(schedule)
            place = directory / f"seed-{schedule.seed}"
            place.mkdir()
            _say(f"seed {schedule.seed}: {schedule}")
            outcome = ScheduleRun(
                schedule, servers, place, _say, name=f"chaos{schedule.seed}", machine=machine
            ).execute()
            outcomes.append(outcome)
            if outcome.is_exact:
                _say(
                    f"          exact: {outcome.records} records, {outcome.rows} rows, "
                    f"{outcome.recoveries} recoveries, {outcome.seconds:.0f} s"
                )
                shutil.rmtree(place, ignore_errors=True)
            else:
                _say(f"          RED: {describe_failure(outcome)}")
                logs[schedule.seed] = str(place)
    if not logs:
        shutil.rmtree(directory, ignore_errors=True)
    not_run = {kind: machine.missing[kind] for kind in asked if kind in machine.missing}
    return ChaosReport(
        tuple(outcomes), kinds, seed, time.monotonic() - began, logs, not_run, machine.remarks
    )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
