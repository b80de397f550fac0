"""The steps of a batch in a trace (`core.traces`), with the vocabulary of a job's steps.

The decisions of one sink id stand for the decision log. A decision has the highest checkpoint that
a task of its attempt can have. Planning, tasks and commit run in processes of their own, and each
records its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from onceflow.core import errors
from onceflow.core.protocol.batches import BatchClaim, BatchDecision, batch_checkpoint
from onceflow.core.traces import Trace


def record_claim(trace: Trace, claim: BatchClaim, sink_ids: Collection[str]) -> None:
    """Record `claim` with the decisions that it has read."""
    last = claim.decisions[-1] if claim.decisions else None
    trace.record(
        "claimed",
        checkpoint=None if last is None else batch_checkpoint(last.attempt),
        by=None if last is None else last.attempt,
        listed=(c.transaction for decision in claim.decisions for c in decision.committables),
        sinks=sink_ids,
    )


def record_decision(
    trace: Trace,
    proposed: BatchDecision,
    sink_ids: Collection[str],
    decide: Callable[[], BatchDecision],
) -> BatchDecision:
    """Record `proposed` before and after `decide`. Return the decision that `decide` returns."""
    checkpoint = batch_checkpoint(proposed.attempt)
    trace.record(
        "deciding",
        checkpoint=checkpoint,
        batch=str(proposed.batch),
        listed=(committable.transaction for committable in proposed.committables),
        subtasks=(),
        sinks=sink_ids,
    )
    try:
        decision = decide()
    except errors.Fenced:
        trace.record("fenced", checkpoint=checkpoint)
        raise
    by = replace(trace, attempt=decision.attempt)
    by.record("decided", checkpoint=batch_checkpoint(decision.attempt))
    return decision


def record_settled(trace: Trace, decision: BatchDecision) -> None:
    """Record that all transactions of `decision` are committed."""
    trace.record(
        "settled",
        by=decision.attempt,
        checkpoint=batch_checkpoint(decision.attempt),
        transactions=(committable.transaction for committable in decision.committables),
    )
