"""Tests that the driver's work for a checkpoint grows linearly with the number of subtasks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.answering_slots import running_job, take_checkpoint


@pytest.mark.parametrize("parallelism", [100, 400])
def test_a_checkpoint_takes_three_messages_a_subtask_and_restarts_find_all_of_it(
    tmp_path: Path, parallelism: int
) -> None:
    """Of two subtasks in a slot: a trigger and a decision a slot, an ack and a commit a subtask."""
    with running_job(parallelism, tmp_path) as (job, slots):
        for _ in range(2):
            assert take_checkpoint(job, slots) == 3 * 2 * parallelism
        last = job.status().last_checkpoint
    with running_job(parallelism // 2, tmp_path) as (job, slots):
        began = job.status().attempts[-1]
    assert last is not None
    assert len(last.subtasks) == 2 * parallelism
    assert began.restored_checkpoint == last.checkpoint
