"""A subtask confirms a checkpoint when it has heard of it and all its sinks have committed it."""

from __future__ import annotations

import queue
from pathlib import Path

from tests.support.counting_source import SCHEMA
from tests.support.directory_sink import DirectorySink
from tests.unit.runtime.slot_parts import slot_context

from onceflow.core.api.graph import Operator, WriteTo
from onceflow.core.protocol.ids import GENESIS, CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import (
    CommittedThrough,
    Complete,
    CompletionHeard,
    SinkCommitted,
)
from onceflow.core.runtime.slot.commits import SlotCommits
from onceflow.core.runtime.slot.context import SlotMail

SUBTASK, SINKLESS = SubtaskRef("balance", 0), SubtaskRef("records", 0)
FIRST, SECOND = CheckpointId(1), CheckpointId(2)


def test_nothing_is_confirmed_that_the_subtask_has_not_heard_of(tmp_path: Path) -> None:
    """Shared state files are deleted on the strength of it; see `protocol.state_files`."""
    mail: queue.SimpleQueue[SlotMail] = queue.SimpleQueue()
    commits = SlotCommits(slot_context(tmp_path / "checkpoints", mail.put))
    needed = {"ledger": FIRST, "audit": FIRST}
    for uid in needed:
        sink = DirectorySink(str(tmp_path / uid))
        commits.worker(SUBTASK, Operator(uid, WriteTo(sink, uid), (), SCHEMA), WriteTo(sink, uid))

    def said(told: list[CommittedThrough]) -> list[tuple[SubtaskRef, CheckpointId, CheckpointId]]:
        return [(one.subtask, one.checkpoint, one.committed) for one in told]

    def committed(through: CheckpointId) -> list[CommittedThrough]:
        """Return what is told when both sinks have committed `through`."""
        told: list[CommittedThrough] = []
        behind = set(needed)
        while behind:
            report = mail.get(timeout=60)
            assert isinstance(report, SinkCommitted)
            told += commits.record_progress(report)
            if report.through == through:
                behind.remove(report.uid)
        return told

    told = commits.commit_through(Complete(FIRST, needed), [SUBTASK, SINKLESS])
    assert said(told) == [(SINKLESS, GENESIS, FIRST)]
    assert said(committed(FIRST)) == [(SUBTASK, GENESIS, FIRST)]
    told = commits.record_progress(CompletionHeard(SINKLESS, FIRST))
    assert said(told) == [(SINKLESS, FIRST, FIRST)]
    told = commits.record_progress(CompletionHeard(SUBTASK, FIRST))
    assert said(told) == [(SUBTASK, FIRST, FIRST)]
    assert commits.record_progress(CompletionHeard(SUBTASK, SECOND)) == []
    assert commits.commit_through(Complete(SECOND, needed), [SUBTASK]) == []
    assert said(committed(SECOND)) == [(SUBTASK, SECOND, SECOND)]
    assert commits.close(lambda: 5.0)
    assert mail.empty()
