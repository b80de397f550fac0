"""The output of `onceflow top`: sections of a job's overview, as tables or plain columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from onceflow.cli.jobs.client import Answer
from onceflow.cli.terminal import print_listing
from onceflow.core.runtime.events.status_parts import describe_bytes, describe_moment

ROWS_SHOWN_MAX = 12
"""The maximum number of rows in a section. The most important rows come first."""
_UNKNOWN = "-"
_STYLES = {"running": "green", "starting": "yellow", "restarting": "yellow", "failed": "red"}


@dataclass(frozen=True, slots=True)
class View:
    """The view of a job at one moment."""

    now: Answer
    """The driver's overview, or the overview from storage."""
    problem: str
    """The reason why the driver does not answer, or "" if it does."""


@dataclass(frozen=True, slots=True)
class Section:
    """A table whose first column is text. The other columns are numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_out: int = 0


def render_view(view: View) -> RenderableType:
    """Return the terminal output of a job."""
    state = str(view.now["state"])
    title = Text.assemble((str(view.now["job"]), "bold"), "  ", (state, _STYLES.get(state, "")))
    title.append(f"  {describe_job(view.now)}", "dim")
    parts: list[RenderableType] = [title]
    if view.problem:
        parts.append(Text(view.problem, "red"))
    parts += [
        Text(wait["summary"], "yellow", no_wrap=True, overflow="ellipsis")
        for wait in view.now.get("waits", ())
    ]
    parts += [Text(warning, "bold yellow") for warning in view.now.get("warnings", ())]
    if error := last_error(view.now):
        parts.append(Text(error, "yellow", no_wrap=True, overflow="ellipsis"))
    for section in list_sections(view.now):
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
        for index, heading in enumerate(section.headings):
            table.add_column(heading, justify="right" if index else "left", no_wrap=bool(index))
        for row in section.rows:
            table.add_row(*row)
        parts += [Text(), table]
        if section.left_out:
            parts.append(Text(f"and {section.left_out} more", "dim"))
    return Group(*parts)


def print_view(view: View, console: Console) -> None:
    """Print a job once. Piped output is never truncated or coloured."""
    if console.is_terminal:
        console.print(render_view(view))
        return
    print(f"{view.now['job']}  {view.now['state']}  {describe_job(view.now)}".rstrip())
    waits = [wait["summary"] for wait in view.now.get("waits", ())]
    warnings = view.now.get("warnings", ())
    for line in (view.problem, *waits, *warnings, last_error(view.now)):
        if line:
            print(line)
    for section in list_sections(view.now):
        print()
        print_listing(
            console, section.headings, [[(cell, "") for cell in row] for row in section.rows]
        )
        if section.left_out:
            print(f"and {section.left_out} more")


def describe_job(now: Answer) -> str:
    """Return attempt, restarts and checkpoints of a job on one line."""
    if not now["running"]:
        decision = now.get("decision") or now.get("last_checkpoint")
        last = f"last decision: checkpoint {decision['checkpoint']}" if decision else "no decision"
        return f"attempt {now['attempt']}, {last}"
    last = now["last_checkpoint"]
    progress = "none yet"
    if last:
        age_s = (now["now_ms"] - last["triggered_at_ms"] - last["duration_ms"]) / 1000
        progress = f"{last['checkpoint']} in {to_seconds(last['duration_ms'] / 1000)}"
        progress += f", {to_seconds(max(0.0, age_s))} ago"
    failed = f", {now['checkpoints_failed']} failed" if now["checkpoints_failed"] else ""
    restarts = now["attempt_count"] - 1
    progress += f"{failed}; {restarts} restart{'' if restarts == 1 else 's'}"
    return f"attempt {now['attempt']}; checkpoint {progress}"


def last_error(now: Answer) -> str:
    """Return the first line of the last error with its time, or "" if there was no error."""
    run = now.get("last_run")
    text = now.get("last_error") or (run.error if run else "")
    first_line = str(text).partition("\n")[0]
    when = describe_moment(now.get("last_error_at_s", 0.0), now["now_ms"] / 1000)
    return f"last error{when}: {first_line}" if first_line and when else first_line


def _latency(sink: Answer, share: str) -> str:
    latency = sink["latency"]  # None: no row has become visible in the last minute
    return to_seconds(latency[share]) if latency else _UNKNOWN


def list_sections(now: Answer) -> Iterator[Section]:
    """Yield the sections of a driver's overview. Yields none without a driver."""
    if "chains" not in now:
        return
    lags = {source["uid"]: source for source in now["sources"]}
    yield _section(
        ("CHAIN", "SUBTASKS", "BUSY", "BACKPRESSURED", "IN/S", "OUT/S", "LAG", "REJECTED"),
        [
            (
                chain["chain"],
                to_count(chain["subtasks"]),
                to_share(chain["busy"]),
                to_share(chain["backpressured"]),
                to_count(chain["records_in_per_s"]),
                to_count(chain["records_out_per_s"]),
                to_count(lags.get(chain["chain"], {}).get("lag")),
                to_count(chain["rejected"]),
            )
            for chain in now["chains"]
        ],
    )
    yield from _list_progress(now)
    yield _section(
        (
            *("SINK", "OPEN", "IN DOUBT", "OLDEST", "COMMITTED", "ROWS", "REJECTED"),
            *("LAST COMMIT", "VISIBLE P50", "P99"),
        ),
        [
            (
                sink["uid"],
                to_count(sink["open"]),
                to_count(sink["prepared"]),
                to_seconds(sink["oldest_prepared_s"]) if sink["prepared"] else _UNKNOWN,
                to_count(sink["committed"]),
                to_count(sink["rows_committed"]),
                to_count(sink["rows_rejected"]),
                to_seconds(sink["last_commit_ms"] / 1000) if sink["last_commit_ms"] else _UNKNOWN,
                _latency(sink, "p50_s"),
                _latency(sink, "p99_s"),
            )
            for sink in now["sinks"]
        ],
    )
    splits = [(source["uid"], split) for source in now["sources"] for split in source["splits"]]
    splits.sort(key=lambda pair: -pair[1]["lag"])
    if splits:
        yield _section(
            ("PARTITION", "POSITION", "LAG"),
            [
                (f"{uid} {split['split']}", to_count(split["next"]), to_count(split["lag"]))
                for uid, split in splits
            ],
        )
    yield _section(
        ("SLOT", "PROCESS", "MEMORY", "HEARD"),
        [
            (
                f"{slot['slot']} on {slot['host']}",
                str(slot["pid"]),
                to_megabytes(slot["rss_bytes"]),
                f"{to_seconds(max(0.0, now['now_ms'] / 1000 - slot['heard_at_s']))} ago",
            )
            for slot in now["slots"]
        ],
    )


def _list_progress(now: Answer) -> Iterator[Section]:
    """Yield the sections of sources that measure bytes and times, and of their first copies."""
    measured = [
        (source["uid"], source["progress"]) for source in now["sources"] if source.get("progress")
    ]
    if measured:
        yield _section(
            ("SOURCE", "BEHIND", "BEHIND BY", "KEPT BY SERVER", "LAST MOVE"),
            [
                (
                    uid,
                    _to_bytes(progress["lag_bytes"]),
                    _UNKNOWN if progress["lag_s"] is None else to_seconds(progress["lag_s"]),
                    _to_bytes(progress["retained_bytes"]),
                    _to_age(progress["moved_at_s"], now),
                )
                for uid, progress in measured
            ],
        )
    copies = [(uid, copy) for uid, progress in measured for copy in progress["copies"]]
    if copies:
        yield _section(
            ("FIRST COPY", "DONE", "ROWS", "OF ABOUT", "CHUNKS", "OF ABOUT"),
            [
                (
                    f"{uid} {copy['table']}",
                    to_share(copy["share"]),
                    to_count(copy["rows"]),
                    to_count(copy["rows_expected"]),
                    to_count(copy["chunks"]),
                    to_count(copy["chunks_expected"]),
                )
                for uid, copy in copies
            ],
        )


def _to_age(at_s: float | None, now: Answer) -> str:
    if at_s is None:
        return _UNKNOWN
    return f"{to_seconds(max(0.0, now['now_ms'] / 1000 - at_s))} ago"


def _to_bytes(value: int | None) -> str:
    return _UNKNOWN if value is None else describe_bytes(value)


def _section(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Section:
    return Section(headings, rows[:ROWS_SHOWN_MAX], max(0, len(rows) - ROWS_SHOWN_MAX))


def to_count(value: float | None) -> str:
    """Return a whole number with separators."""
    return _UNKNOWN if value is None else f"{value:,.0f}"


def to_share(value: float | None) -> str:
    """Return a share of 1 in per cent."""
    return _UNKNOWN if value is None else f"{value * 100:.0f} %"


def to_seconds(value: float) -> str:
    """Return a duration in milliseconds, seconds, minutes or hours, depending on its size."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes = int(value // 60)
    return (
        f"{minutes} min {value % 60:.0f} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60} min"
    )


def to_megabytes(value: int) -> str:
    """Return the memory size of a process in MB."""
    return f"{value / 1e6:,.0f} MB" if value else _UNKNOWN
