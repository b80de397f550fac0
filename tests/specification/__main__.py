"""Checks the specification of the protocol in small worlds: script/spec --help."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from tests.specification.checker import CheckerFailed, Verdict, build, check
from tests.specification.worlds import WORLDS, World, read_mistakes


def spec(
    world: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this; may be repeated: {', '.join(w.name for w in WORLDS)}."),
    ] = None,
    mistake: Annotated[
        list[str] | None, typer.Option(help="Only this mistake, with its trace; may be repeated.")
    ] = None,
    traces: Annotated[
        bool, typer.Option("--traces", help="Print the trace of each mistake.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check the protocol as it is, which must break no law, and with mistakes, which must.

    The exit status is 1 if a law is broken, or if a mistake breaks none.
    """
    began = time.monotonic()
    worlds = [w for w in WORLDS if world is None or w.name in world]
    names = read_mistakes().keys()
    if unknown := {*(world or ())} - {w.name for w in WORLDS} | ({*(mistake or ())} - names):
        raise typer.BadParameter(f"no such world or mistake: {', '.join(sorted(unknown))}")
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        checked = threads.map(_check_world, worlds, [mistake] * len(worlds))
        verdicts = [verdict for of_world in checked for verdict in of_world]
    seconds = time.monotonic() - began
    is_right = all(verdict.is_expected for verdict in verdicts)
    if as_json:
        report = {"verdicts": [asdict(v) for v in verdicts], "seconds": seconds, "ok": is_right}
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        _print(verdicts, seconds, shows_traces=traces or mistake is not None)
    raise typer.Exit(0 if is_right else 1)


def _check_world(world: World, only: Sequence[str] | None) -> Sequence[Verdict]:
    mistakes, verdicts = read_mistakes(), list[Verdict]()
    with tempfile.TemporaryDirectory(prefix="onceflow-spec-") as name:
        directory = Path(name)
        checker = build(world, directory)
        chosen = [mistakes[m] for m in world.mistakes if only is None or m in only]
        for tried in chosen if only is not None else [None, *chosen]:
            verdict = check(world, checker, tried, directory)
            state = "as expected" if verdict.is_expected else "WRONG"
            sys.stderr.write(f"{state}: {world.name}: {verdict.mistake or 'as it is'}\n")
            verdicts.append(verdict)
    return verdicts


def _print(verdicts: Sequence[Verdict], seconds: float, *, shows_traces: bool) -> None:
    mistakes = read_mistakes()
    console = Console(width=160, soft_wrap=True)
    table = Table("world", "protocol", "states", "depth", "s", "verdict")
    for verdict in verdicts:
        tried = mistakes[verdict.mistake].description if verdict.mistake else "as it is"
        law = verdict.violation or "no law is broken"
        text = law if verdict.is_expected else f"WRONG: {law}"
        numbers = (f"{verdict.states:,}", str(verdict.depth), f"{verdict.seconds:.1f}")
        table.add_row(verdict.world, tried, *numbers, text)
    console.print(table)
    for verdict in verdicts:
        if verdict.trace and (shows_traces or not verdict.is_expected):
            console.print(f"\n{verdict.world}: {verdict.mistake or 'as it is'}", highlight=False)
            console.print("\n".join(f"    {step}" for step in verdict.trace), highlight=False)
            console.print(f"    => {verdict.violation}", highlight=False)
    wrong = sum(not verdict.is_expected for verdict in verdicts)
    states = sum(verdict.states for verdict in verdicts if not verdict.mistake)
    mistaken = sum(bool(verdict.mistake) for verdict in verdicts)
    console.print(
        f"{len(verdicts) - mistaken} worlds with {states:,} states, {mistaken} mistakes,"
        f" {wrong} wrong,"
        f" {seconds:.0f} s"
    )


if __name__ == "__main__":
    try:
        typer.run(spec)
    except CheckerFailed as error:
        sys.exit(f"script/spec: {error}")
