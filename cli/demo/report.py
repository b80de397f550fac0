"""The end of the demo, for a person and for a program."""

from __future__ import annotations

from rich.table import Table

from onceflow.cli.demo.kills import DoneKill
from onceflow.cli.demo.run import DemoResult
from onceflow.cli.demo.settings import SinkKind


def as_json(result: DemoResult) -> dict[str, object]:
    """Return the one object that `--json` prints."""
    verdict, settings = result.verdict, result.settings
    return {
        "records": verdict.records,
        "rows": verdict.rows,
        "duplicates": verdict.duplicates,
        "missing": verdict.missing,
        "unexpected": verdict.unexpected,
        "wrong_balances": verdict.wrong_balances,
        "altered": verdict.altered,
        "in_doubt": verdict.in_doubt,
        "kills": [_kill_as_json(kill) for kill in result.kills],
        "restores": result.restores,
        "drivers": result.drivers,
        "seconds": round(result.seconds, 3),
        "rows_per_second": round(result.rows_per_second),
        "delivery": "at_least_once" if settings.at_least_once else "exactly_once",
        "sink": settings.sink.value,
        "commit_mode": settings.commit_mode.value,
        "backend": settings.backend.value,
        "accounts": settings.accounts,
        "partitions": settings.partitions,
        "parallelism": settings.parallelism,
        "interval_s": settings.interval_s,
        "seed": settings.seed,
        "ok": result.ok,
    }


def _kill_as_json(kill: DoneKill) -> dict[str, object]:
    return {
        "what": kill.kind.value,
        "pids": list(kill.pids),
        "at_records": kill.at_records,
        "committed_records": kill.committed_records,
        "at_rows": kill.at_rows,
        "at_seconds": round(kill.at_s, 3),
        "recovered_seconds": None if kill.recovered_s is None else round(kill.recovered_s, 3),
    }


def kills_table(result: DemoResult) -> Table:
    """Return what was killed, when, and how long records stood still."""
    table = Table(title="Killed with SIGKILL", title_justify="left")
    table.add_column("what")
    for heading in ("at (s)", "records read", "committed", "flowing again after (s)"):
        table.add_column(heading, justify="right")
    for kill in result.kills:
        recovered = "at the end" if kill.recovered_s is None else f"{kill.recovered_s:.1f}"
        table.add_row(
            kill.kind.value,
            f"{kill.at_s:.1f}",
            f"{kill.at_records:,}",
            f"{kill.committed_records:,}",
            recovered,
        )
    return table


def proof_table(result: DemoResult) -> Table:
    """Return the verdict, line by line, as the target gave it."""
    verdict, sink = result.verdict, result.settings.sink
    title = (
        "What a read_committed consumer gets"
        if sink is SinkKind.KAFKA
        else "What SQL says about the table"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("question")
    table.add_column("expected", justify="right")
    table.add_column("found", justify="right")
    for question, expected, found in (
        ("rows", verdict.records, verdict.rows),
        ("ids there twice", 0, verdict.duplicates),
        ("ids missing", 0, verdict.missing),
        ("ids never produced", 0, verdict.unexpected),
        ("balances that do not follow", 0, verdict.wrong_balances),
        ("accounts or amounts altered", 0, int(verdict.altered)),
        ("transactions in doubt", 0, verdict.in_doubt),
    ):
        colour = "green" if expected == found else "bold red"
        table.add_row(question, f"{expected:,}", f"[{colour}]{found:,}[/{colour}]")
    return table


def summary(result: DemoResult) -> str:
    """Return the last line."""
    numbers = (
        f"{result.verdict.records:,} payments in {result.seconds:.1f} s "
        f"({result.rows_per_second:,.0f} a second, restarts included), "
        f"{len(result.kills)} kills, {result.restores} restores"
    )
    if result.ok:
        judgement = "[bold green]Every payment is there exactly once.[/bold green]"
    else:
        judgement = (
            f"[bold red]The {result.settings.sink.place} is wrong{_faults(result)}.[/bold red]"
        )
    return f"{judgement} {numbers}."


def _faults(result: DemoResult) -> str:
    """Return what is wrong, in words, and whether that was to be expected."""
    verdict = result.verdict
    counted = (
        (verdict.duplicates, "there twice"),
        (verdict.missing, "missing"),
        (verdict.unexpected, "never produced"),
        (verdict.wrong_balances, "with a balance that does not follow"),
        (verdict.in_doubt, "transactions in doubt"),
    )
    found = ", ".join(f"{count:,} {what}" for count, what in counted if count)
    allowed = (
        ", as at least once allows" if result.settings.at_least_once and not verdict.missing else ""
    )
    return f": {found}{allowed}" if found else ""
