"""The events of a trace: read from the files of processes, written to one file, shown to people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from onceflow.core.protocol.ids import TransactionId

_SHOWN_MAX = 6
"""The maximum number of transactions or splits in the text of an event."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step of the protocol that a process has recorded."""

    process: str
    step: str
    log: str
    attempt: int
    slot: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_recent: bool = False
    """True if the process wrote the event while the files were read. Its cause may be unread."""

    @property
    def checkpoint(self) -> int:
        """The checkpoint to which the event belongs."""
        checkpoint: int = self.facts["checkpoint"]
        return checkpoint

    def transactions(self, fact: str = "transactions") -> tuple[TransactionId, ...]:
        """Return the transactions of `fact`."""
        named = map(TransactionId.parse, self.facts.get(fact, ()))
        return tuple(transaction for transaction in named if transaction is not None)

    def __str__(self) -> str:
        part = "driver" if self.slot is None else f"slot {self.slot}"
        facts = ", ".join(f"{name} {_shorten(value)}" for name, value in self.facts.items())
        return f"{self.process:>8} {part} of attempt {self.attempt}: {self.step} {facts}".rstrip()


Trace = Mapping[str, Sequence[TracedStep]]
"""The events of each process, in the order of the process."""


def read_trace(directory: Path) -> Trace:
    """Return the events in the files of `directory`. Processes may still write."""
    # Every file gets its size before the first one is read. So the causes of all events within
    # these sizes are found by the reads.
    sizes = {path: path.stat().st_size for path in sorted(directory.glob("*.jsonl"))}
    return {path.stem: _parse(path.stem, path.read_bytes(), size) for path, size in sizes.items()}


def _parse(process: str, data: bytes, size: int) -> Sequence[TracedStep]:
    events: list[TracedStep] = []
    end = 0
    for line in data.splitlines(keepends=True):
        end += len(line)
        # A line without its end is being written.
        if line.endswith(b"\n"):
            events.append(decode_event(process, line, is_recent=end > size))
    return events


def decode_event(process: str, line: bytes, *, is_recent: bool = False) -> TracedStep:
    """Return the event in `line`, which `process` has written unless the line names another."""
    facts: dict[str, Any] = msgspec.json.decode(line)
    return TracedStep(
        str(facts.pop("process", process)),
        facts.pop("step"),
        facts.pop("log"),
        facts.pop("attempt"),
        facts.pop("slot", None),
        facts,
        is_recent,
    )


def split_by_log(trace: Trace) -> dict[str, Trace]:
    """Return the trace of each decision log. Events outside of jobs are left out."""
    logs: dict[str, dict[str, list[TracedStep]]] = {}
    for process, events in trace.items():
        for event in events:
            if event.log:
                logs.setdefault(event.log, {}).setdefault(process, []).append(event)
    return {log: dict(processes) for log, processes in logs.items()}


def write_trace(path: Path, events: Iterable[TracedStep]) -> None:
    """Write `events`, of any processes, as lines that `load_trace` reads."""
    path.write_bytes(b"".join(map(_encode, events)))


def _encode(event: TracedStep) -> bytes:
    line = {
        "process": event.process,
        "step": event.step,
        "log": event.log,
        "attempt": event.attempt,
        **({} if event.slot is None else {"slot": event.slot}),
        **event.facts,
    }
    return msgspec.json.encode(line) + b"\n"


def load_trace(path: Path) -> Trace:
    """Return the events that `write_trace` has written to `path`, by process."""
    trace: dict[str, list[TracedStep]] = {}
    for event in _parse("", path.read_bytes(), path.stat().st_size):
        trace.setdefault(event.process, []).append(event)
    return {process: tuple(events) for process, events in trace.items()}


def _shorten(value: object) -> str:
    if not isinstance(value, list):
        return str(value)
    # Elements are strings, or pairs of a split and its position.
    items = cast("list[str | list[str]]", value)
    shown = [":".join(item) if isinstance(item, list) else item for item in items[:_SHOWN_MAX]]
    more = f" and {len(items) - _SHOWN_MAX} more" if len(items) > _SHOWN_MAX else ""
    return f"[{' '.join(shown)}{more}]"
