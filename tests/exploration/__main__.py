"""Explores production's code in small worlds, exhaustively: script/explore --help."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from tests.exploration.mistakes import MISTAKES, Mistake
from tests.exploration.runs import Result, explore
from tests.exploration.search import Limits
from tests.exploration.worlds import WORLDS, World

CUT_OFF = 4
"""The exit status if a limit has cut a search off, and no law was broken."""


def main(
    world: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this; may be repeated: {', '.join(w.name for w in WORLDS)}."),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the worlds and the mistakes, and explore nothing.")
    ] = False,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Also try each mistake, which must break a law.")
    ] = False,
    mistake: Annotated[
        list[str] | None, typer.Option(help="Only this mistake, with its trace; may be repeated.")
    ] = None,
    faults: Annotated[int | None, typer.Option(min=0, help="The number of faults.")] = None,
    checkpoints: Annotated[
        int | None, typer.Option(min=0, help="The checkpoints before the one at the end.")
    ] = None,
    max_states: Annotated[int | None, typer.Option(min=1, help="States of each search.")] = None,
    at_most_s: Annotated[float | None, typer.Option(help="Seconds of each search.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Visit every state of small worlds in which production's code runs the protocol.

    The exit status is 0 only if each search has visited all states and no law is broken, and if
    each mistake breaks one. It is 1 if not, and 4 if a limit has cut a search off.
    """
    names = {w.name for w in WORLDS}
    if unknown := sorted(
        {*(world or ())} - names | ({*(mistake or ())} - {m.name for m in MISTAKES})
    ):
        raise typer.BadParameter(
            f"no such world or mistake: {', '.join(sorted(unknown))}; see --list"
        )
    if list_:
        _print_list()
        return
    began = time.monotonic()
    changes = {"faults": faults, "checkpoints": checkpoints}
    given: dict[str, Any] = {name: n for name, n in changes.items() if n is not None}
    chosen = [w for w in WORLDS if (w.name in world if world else mistake is None)]
    jobs: list[tuple[World, Mistake | None]] = [(replace(w, **given), None) for w in chosen]
    if mutants or mistake:
        by_name = {w.name: w for w in WORLDS}
        jobs += [(by_name[m.world], m) for m in MISTAKES if mistake is None or m.name in mistake]
    results = _run(jobs, Limits(max_states, at_most_s))
    _report(results, time.monotonic() - began, as_json=as_json, shows_traces=mistake is not None)
    if any(result.is_wrong for result in results):
        raise typer.Exit(1)
    raise typer.Exit(CUT_OFF if any(result.is_cut_off for result in results) else 0)


def _run(jobs: Sequence[tuple[World, Mistake | None]], limits: Limits) -> list[Result]:
    tell = _progress() if sys.stderr.isatty() and len(jobs) == 1 else None
    if len(jobs) == 1:
        return [explore(*jobs[0], limits, tell)]
    results: list[Result] = []
    # Each search has all its states in one process. Two at a time, as a small machine has cores.
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        for future in [processes.submit(explore, *job, limits) for job in jobs]:
            result = future.result()
            results.append(result)
            state = (
                "WRONG" if result.is_wrong else "cut off" if result.is_cut_off else "as expected"
            )
            sys.stderr.write(f"{state}: {result.world}: {result.mistake or 'as it is'}\n")
    return results


def _progress() -> Callable[[int, int], None]:
    def tell(states: int, depth: int) -> None:
        sys.stderr.write(f"\r{states:,} states, depth {depth} ")
        sys.stderr.flush()

    return tell


def _report(
    results: Sequence[Result], seconds: float, *, as_json: bool, shows_traces: bool
) -> None:
    if as_json:
        rows = [asdict(result) for result in results]
        is_right = not any(result.is_wrong or result.is_cut_off for result in results)
        sys.stdout.write(json.dumps({"results": rows, "seconds": seconds, "ok": is_right}) + "\n")
        return
    console = Console(width=160, soft_wrap=True)
    table = Table("world", "protocol", "states", "depth", "s", "verdict")
    for result in results:
        text = result.violation or ("cut off" if result.is_cut_off else "no law is broken")
        numbers = f"{result.states:,}", str(result.depth), f"{result.seconds:.1f}"
        text = f"WRONG: {text}" if result.is_wrong else text
        table.add_row(result.world, result.mistake or "as it is", *numbers, text)
    console.print(table)
    for result in results:
        if result.trace and (shows_traces or result.is_wrong):
            console.print(f"\n{result.world}: {result.mistake or 'as it is'}", highlight=False)
            console.print(
                "\n".join(f"    {step}" for step in result.trace), highlight=False, markup=False
            )
            console.print(f"    => {result.violation}", highlight=False, markup=False)
    states = sum(result.states for result in results if not result.mistake)
    wrong = sum(result.is_wrong for result in results)
    mistakes = sum(bool(result.mistake) for result in results)
    console.print(
        f"{len(results) - mistakes} worlds with {states:,} states, {mistakes} mistakes,"
        f" {wrong} wrong, {seconds:.0f} s"
    )


def _print_list() -> None:
    console = Console(width=160, soft_wrap=True)
    table = Table("world", "what it has")
    for world in WORLDS:
        table.add_row(world.name, world.description)
    console.print(table)
    table = Table("mistake", "is tried in")
    for mistake in MISTAKES:
        table.add_row(mistake.name, mistake.world)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
