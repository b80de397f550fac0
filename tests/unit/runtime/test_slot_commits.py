"""A subtask confirms a checkpoint when it has heard of it and all its sinks have committed it."""

from __future__ import annotations

import queue
from pathlib import Path

from tests.support.counting_source import SCHEMA
from tests.support.directory_sink import DirectorySink

from onceflow import RuntimeSettings
from onceflow.core.config import Delivery
from onceflow.core.graph import Operator, WriteTo
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, SubtaskRef
from onceflow.core.runtime.slot.commits import SlotCommits
from onceflow.core.runtime.slot.context import SlotPlan
from onceflow.core.storage import FileSystemStorage

SUBTASK, SINKLESS = SubtaskRef("balance", 0), SubtaskRef("records", 0)
FIRST, SECOND = CheckpointId(1), CheckpointId(2)


def test_nothing_is_confirmed_that_the_subtask_has_not_heard_of(tmp_path: Path) -> None:
    """Shared state files are deleted on the strength of it; see `protocol.state_files`."""
    told: queue.SimpleQueue[tuple[SubtaskRef, CheckpointId, CheckpointId]] = queue.SimpleQueue()
    failures: list[BaseException] = []
    commits = SlotCommits(
        SlotPlan("ledger", AttemptId(1), 1, 128, Delivery.EXACTLY_ONCE, RuntimeSettings()),
        FileSystemStorage(str(tmp_path / "checkpoints")).open("ledger"),
        "log",
        committed=lambda ref, confirmed, committed, commit_ms: told.put(
            (ref, confirmed, committed)
        ),
        failed=failures.append,
    )
    needed = {"ledger": FIRST, "audit": FIRST}
    for uid in needed:
        sink = DirectorySink(str(tmp_path / uid))
        commits.worker(SUBTASK, Operator(uid, WriteTo(sink, uid), None, SCHEMA), WriteTo(sink, uid))
    both = [SUBTASK, SINKLESS]
    commits.completed(FIRST, needed, both)
    found = {told.get(timeout=5), told.get(timeout=5)}
    assert found == {(SUBTASK, GENESIS, FIRST), (SINKLESS, GENESIS, FIRST)}
    commits.heard(SINKLESS, FIRST)
    assert told.get(timeout=5) == (SINKLESS, FIRST, FIRST)
    commits.heard(SUBTASK, FIRST)
    assert told.get(timeout=5) == (SUBTASK, FIRST, FIRST)
    commits.heard(SUBTASK, SECOND)
    commits.completed(SECOND, needed, [SUBTASK])
    assert told.get(timeout=5) == (SUBTASK, SECOND, SECOND)
    commits.close(lambda: 5.0)
    assert failures == []
    assert told.empty()
