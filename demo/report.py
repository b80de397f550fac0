"""Prints the progress of the demo for people, and its result for people and programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from demo.driver import DriverStatus, SinkTransactions
from demo.kills import DoneKill
from demo.move import DoneMove
from demo.settings import DemoSettings, SinkKind
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from typing_extensions import Self

from onceflow.integration.judge import Verdict

_LENGTH_MAX = 240


class Narrator:
    """Bars on a terminal, plain lines elsewhere, nothing when quiet."""

    def __init__(self, *, quiet: bool) -> None:
        """Describe it; entering the context shows it."""
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._bar_of: dict[str, TaskID] = {}

    def say(self, line: str) -> None:
        """Print one line above the bars."""
        self._console.print(line, markup=False, soft_wrap=True)

    def bar(self, name: str, total: int) -> Callable[[int], None]:
        """Show a bar; return what sets how far it has come. One name is one bar."""
        if name not in self._bar_of:
            self._bar_of[name] = self._bars.add_task(name, total=total)
        task = self._bar_of[name]

        def advance(completed: int) -> None:
            self._bars.update(task, completed=min(completed, total))

        return advance

    def note(self, name: str, text: str) -> None:
        """Show `text` beside the bar called `name`; nothing where there are no bars."""
        if name in self._bar_of:
            self._bars.update(self._bar_of[name], description=f"{name} ({text})")

    def __enter__(self) -> Self:
        """Show the bars."""
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the bars as they stand."""
        self._bars.stop()


class StatusWatcher:
    """Tells each reason once, and the state of the transactions whenever it is looked at."""

    def __init__(self, say: Callable[[str], None], show: Callable[[str], None]) -> None:
        """Take what prints a line, and what shows a text in the place of the one before."""
        self._say = say
        self._show = show
        self._told = ""

    def look(self, status: DriverStatus | None) -> None:
        """Tell what is new in `status`."""
        if status is None:
            return
        if status.sinks:
            self._show("; ".join(describe(sink) for sink in status.sinks))
        if status.last_error and status.last_error != self._told:
            self._told = status.last_error
            reason = " ".join(status.last_error.split())
            cut = reason if len(reason) <= _LENGTH_MAX else f"{reason[:_LENGTH_MAX]}…"
            self._say(f"        the job, attempt {status.attempt}: {cut}")


def describe(sink: SinkTransactions) -> str:
    """Return the transactions of one sink in words."""
    age = f", oldest for {sink.oldest_prepared_s:.1f} s" if sink.prepared else ""
    return (
        f"transactions: {sink.open} open, {sink.prepared} prepared{age},"
        f" {sink.committed} committed, {sink.aborted} rolled back"
    )


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The result of a demo."""

    settings: DemoSettings
    verdict: Verdict
    kills: tuple[DoneKill, ...]
    restores: int
    """Attempts after the first."""
    drivers: int
    """Driver processes that ran."""
    seconds: float
    """From the start of the first driver process to the end of the last, recoveries included."""
    move: DoneMove | None = None

    @property
    def ok(self) -> bool:
        """True if the target is right."""
        return self.verdict.ok

    @property
    def rows_per_second(self) -> float:
        """Records over seconds, with every restart in them."""
        return self.verdict.records / self.seconds if self.seconds else 0.0


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
        "storage": settings.storage.value,
        "unaligned": settings.unaligned,
        "move": None if result.move is None else _move_as_json(result.move),
        "seed": settings.seed,
        "ok": result.ok,
    }


def _move_as_json(move: DoneMove) -> dict[str, object]:
    return {
        "savepoint": move.savepoint,
        "at_seconds": round(move.at_s, 3),
        "stopped_seconds": round(move.stopped_s, 3),
        "parallelism": list(move.parallelism),
        "backend": list(move.backend),
        "storage": list(move.storage),
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
    for question, expected, actual in (
        ("rows", verdict.records, verdict.rows),
        ("ids there twice", 0, verdict.duplicates),
        ("ids missing", 0, verdict.missing),
        ("ids never produced", 0, verdict.unexpected),
        ("balances that do not follow", 0, verdict.wrong_balances),
        ("accounts or amounts altered", 0, int(verdict.altered)),
        ("transactions in doubt", 0, verdict.in_doubt),
    ):
        colour = "green" if expected == actual else "bold red"
        table.add_row(question, f"{expected:,}", f"[{colour}]{actual:,}[/{colour}]")
    return table


def summary(result: DemoResult) -> str:
    """Return the last line."""
    kills = len(result.kills)
    numbers = (
        f"{result.verdict.records:,} payments in {result.seconds:.1f} s "
        f"({result.rows_per_second:,.0f} a second, restarts included), "
        f"{kills} kill{'' if kills == 1 else 's'}, {result.restores} restores"
        f"{', moved by a savepoint' if result.move else ''}"
    )
    if result.ok:
        judgement = "[bold green]Every payment is there exactly once.[/bold green]"
    else:
        target = result.settings.sink.target_kind
        judgement = f"[bold red]The {target} is wrong{_faults(result)}.[/bold red]"
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
    counts = ", ".join(f"{count:,} {what}" for count, what in counted if count)
    allowed = (
        ", as at least once allows" if result.settings.at_least_once and not verdict.missing else ""
    )
    return f": {counts}{allowed}" if counts else ""
