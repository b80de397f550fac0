"""Tests the times at which a commit is repeated."""

from __future__ import annotations

import pytest

from onceflow.core.commit.queue import CommitQueue, CommitRetryPolicy, RetryAt
from onceflow.core.protocol.committables import Committable, RetryLater
from onceflow.core.protocol.ids import CheckpointId, TransactionId


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial_delay_s": 0.0},
        {"max_delay_s": 0.01},
        {"multiplier": 0.5},
        {"deadline_s": -1.0},
    ],
)
def test_policies_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        CommitRetryPolicy(**wrong)  # type: ignore[arg-type]


def test_policies_at_the_ends_of_the_ranges_are_accepted() -> None:
    policy = CommitRetryPolicy(initial_delay_s=1.0, multiplier=1.0, max_delay_s=1.0, deadline_s=0.0)
    assert [policy.delay_s(tries) for tries in (1, 2, 1000)] == [1.0, 1.0, 1.0]


def test_a_running_job_waits_for_a_person_who_must_fix_a_row() -> None:
    """The default: an attempt that fails instead would start again and meet the same row."""
    queue = CommitQueue(CommitRetryPolicy())
    waiting = Committable(TransactionId("sink", 1, 1, 0), rows=7)
    queue.pre_committed(CheckpointId(1), [waiting])
    queue.note_decision(CheckpointId(1))
    refused = RetryLater("a row breaks a constraint", until_fixed=True)
    assert isinstance(queue.outcome(waiting, refused, 0.0), RetryAt)
