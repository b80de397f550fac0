"""The order of the events of several processes: each event after those that have caused it.

Two events of one process have the order of its file. A message orders two events of two processes:
the sender records it before it sends, and the receiver after it has arrived. Both name the same
attempt, checkpoint and subtask. Clocks are not used, because they prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from onceflow.integration.traces.events import Trace, TracedStep

_Cause = tuple[object, ...]
"""The step, the attempt, and the checkpoint, subtask or transaction if there are any."""


@dataclass(slots=True)
class Ordered:
    """The events of one decision log in an order of causes and effects."""

    events: list[TracedStep] = field(default_factory=list[TracedStep])
    without_cause: list[tuple[TracedStep, _Cause]] = field(
        default_factory=list[tuple[TracedStep, _Cause]]
    )
    """The events whose cause is in no trace, each with that cause, and none that follow them."""


def order_events(trace: Trace) -> Ordered:
    """Return the events of `trace`, which has one decision log, in an order of their causes."""
    claimed = {event.attempt for events in trace.values() for event in events if _is_claim(event)}
    ordered, seen = Ordered(), set[_Cause]()
    left = {process: list(events) for process, events in trace.items() if events}
    while left:
        ready = [
            process for process, events in left.items() if not _missing(events[0], seen, claimed)
        ]
        for process in ready:
            events = left[process]
            while events and not _missing(events[0], seen, claimed):
                event = events.pop(0)
                ordered.events.append(event)
                seen.update(_provides(event))
            if not events:
                del left[process]
        if not ready:
            break
    for events in left.values():
        if not events[0].is_recent:
            ordered.without_cause.append((events[0], _missing(events[0], seen, claimed)[0]))
    return ordered


def _is_claim(event: TracedStep) -> bool:
    return event.step == "claimed"


def _missing(event: TracedStep, seen: set[_Cause], claimed: set[int]) -> Sequence[_Cause]:
    return [cause for cause in _needs(event, seen, claimed) if cause not in seen]


_CAUSES = {"restored": "deployed", "acked": "triggered", "heard": "completed"}
"""The step with the same checkpoint that comes before a step, by the later one."""
_NAMED_BY_CHECKPOINT = {"deciding", "deployed", "triggered", "completed"}


def _needs(event: TracedStep, seen: set[_Cause], claimed: set[int]) -> Iterator[_Cause]:
    attempt = event.attempt
    if event.step != "claimed" and attempt in claimed:
        yield "claimed", attempt
    if event.step in _CAUSES:
        yield _CAUSES[event.step], attempt, event.checkpoint
    elif event.step == "claimed" and event.facts["by"] in claimed:
        yield "deciding", event.facts["by"], event.checkpoint
    elif event.step in {"deciding", "saving"} and ("triggered", attempt, event.checkpoint) in seen:
        for subtask in event.facts["subtasks"]:
            yield "acked", attempt, event.checkpoint, subtask
    elif event.step == "deciding" and "batch" in event.facts:
        for transaction in event.facts["listed"]:
            yield "prepared", attempt, transaction


def _provides(event: TracedStep) -> Iterator[_Cause]:
    if event.step in _NAMED_BY_CHECKPOINT:
        yield event.step, event.attempt, event.checkpoint
    elif event.step == "acked":
        yield "acked", event.attempt, event.checkpoint, event.facts["subtask"]
    elif event.step == "claimed":
        yield "claimed", event.attempt
    elif event.step == "prepared":
        for transaction in event.facts["transactions"]:
            yield "prepared", event.attempt, transaction
