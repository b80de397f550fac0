"""The command behind script/scoreboard."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.machine import describe_machine
from benchmarks.scoreboard.contestant import Contestant
from benchmarks.scoreboard.contestants.all import OURS, list_contestants
from benchmarks.scoreboard.report import (
    Row,
    describe_settings,
    make_results,
    make_rows,
    read_results,
    to_markdown,
    to_terminal,
)
from benchmarks.scoreboard.run import Outcome, run
from benchmarks.scoreboard.schedule import draw_schedule


def main() -> int:
    """Run the schedules. Return 1 if onceflow was not exact, or a run has no verdict."""
    contestants = list_contestants()
    arguments = _parse([contestant.name for contestant in contestants])
    if arguments.list:
        for contestant in contestants:
            sys.stdout.write(f"{contestant.name:16} {contestant.engine}, {contestant.sink}\n")
        return 0
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    chosen = [c for c in contestants if not arguments.only or c.name in arguments.only]
    outcomes: list[Outcome] = []
    for path in arguments.add or ():
        outcomes += read_results(Path(path)).outcomes
    for number in range(arguments.rounds):
        _run_round(chosen, seed + number, arguments.records, arguments.seconds, outcomes)
        _save(arguments, outcomes)
    _save(arguments, outcomes)
    rows = make_rows(contestants, outcomes)
    _say(to_terminal(rows))
    if arguments.markdown:
        page = f"{to_markdown(rows)}\n\n{describe_settings(rows)}\n"
        Path(arguments.markdown).write_text(page, encoding="utf-8")
    return 0 if _is_ok(rows) else 1


def _parse(names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="script/scoreboard",
        description="Runs the same schedules of crashes against onceflow and other engines, each"
        " from Kafka to Postgres, and compares the tables with a model of the records. Exit status"
        " 1: onceflow was not exact, or a run had no verdict.",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="of the first round")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="schedules (default: 1)")
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help="run this one; may repeat"
    )
    parser.add_argument(
        "--records", type=int, default=100_000, metavar="N", help="of a run (default: 100,000)"
    )
    parser.add_argument(
        "--seconds", type=float, default=50.0, metavar="S", help="to send them (default: 50)"
    )
    parser.add_argument("--list", action="store_true", help="list the names and end")
    parser.add_argument("--json", metavar="FILE", help="write all outcomes")
    parser.add_argument(
        "--add", action="append", metavar="FILE", help="add the outcomes of an earlier --json"
    )
    parser.add_argument("--markdown", metavar="FILE", help="write the table and all settings")
    return parser.parse_args()


def _run_round(
    chosen: Sequence[Contestant],
    seed: int,
    records: int,
    producing_s: float,
    outcomes: list[Outcome],
) -> None:
    schedule = draw_schedule(seed, producing_s)
    _say(f"seed {seed}: {schedule}")
    for contestant in chosen:
        _say(f"{contestant.name}: {contestant.engine}, {contestant.sink}")
        outcome = run(contestant, schedule, records, _say)
        outcomes.append(outcome)
        _say(f"    {_describe(outcome)}")


def _describe(outcome: Outcome) -> str:
    if outcome.not_run:
        return f"not run: {outcome.not_run}"
    if outcome.verdict is None:
        return f"NO VERDICT: {outcome.failure}"
    verdict = outcome.verdict
    text = (
        f"{verdict.lost} lost, {verdict.doubled} twice, {verdict.altered} altered,"
        f" {verdict.wrong_totals} totals wrong, {verdict.prepared} transactions left over"
    )
    result = "exact" if verdict.is_exact else text
    return f"{result}; {outcome.starts} starts, {outcome.seconds:g} s, load {outcome.load:g}"


def _save(arguments: argparse.Namespace, outcomes: Sequence[Outcome]) -> None:
    if arguments.json:
        results = make_results(describe_machine(), outcomes)
        Path(arguments.json).write_bytes(msgspec.json.format(msgspec.json.encode(results)))


def _is_ok(rows: Sequence[Row]) -> bool:
    """Return False if onceflow was not exact, or a run of any engine has no verdict."""
    return all(
        (row.is_exact if row.contestant.name == OURS else True)
        and not any(outcome.failure for outcome in row.outcomes)
        for row in rows
    )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
