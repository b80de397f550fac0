"""The progress output of `onceflow run` on stderr. On a terminal it is one line that changes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from onceflow.cli.terminal import say
from onceflow.core.api.pipeline import Job
from onceflow.core.runtime.events.job_events import AttemptRunning, JobEvent
from onceflow.core.runtime.events.status import JobStatus

_PER_SECOND = 2.0


@contextmanager
def show_progress(job: Job) -> Generator[None]:
    """Show the progress of `job` during the block. Without a terminal, show only attempt starts."""
    job.add_listener(_say_when_running)
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield
        return
    with Live(
        get_renderable=lambda: describe_progress(job.status()),
        console=console,
        refresh_per_second=_PER_SECOND,
        transient=True,
    ):
        yield


def describe_progress(status: JobStatus) -> Text:
    """Return one line: the state, the numbers of records and rows, and the last checkpoint."""
    committed = sum(sink.rows_committed for sink in status.sinks)
    last = status.last_checkpoint
    checkpoint = f"{last.checkpoint} in {last.duration_ms:.0f} ms" if last else "none yet"
    lag = sum(status.lag.values())
    text = (
        f"{status.job}: {status.state.value}, {status.records_in:,} records read,"
        f" {committed:,} rows committed, checkpoint {checkpoint}"
    )
    return Text(
        text + (f", {lag:,} records behind" if lag else ""), no_wrap=True, overflow="ellipsis"
    )


def _say_when_running(event: JobEvent, status: JobStatus) -> None:
    if isinstance(event, AttemptRunning):
        attempt = status.attempts[-1]
        restored = attempt.restored_checkpoint
        since = f"from checkpoint {restored}" if restored else "from the beginning"
        say(f"onceflow: job {status.job} runs, attempt {attempt.attempt}, {since}")
