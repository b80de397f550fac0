from __future__ import annotations

import pyarrow as pa

from onceflow.core.protocol.committables import Committed
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import CommitterContext, WriterContext
from onceflow.sinks import DiscardSink

ROWS = pa.record_batch({"id": pa.array([1, 2, 3])})
CONTEXT = WriterContext("j", "out", "j.out", 0, 1, AttemptId(1), CheckpointId(1), ROWS.schema)


def test_each_row_is_counted_in_the_checkpoint_that_follows_it() -> None:
    writer = DiscardSink().writer(CONTEXT)
    writer.write(ROWS)
    writer.write(ROWS.slice(1))
    (first,) = writer.pre_commit(CheckpointId(1))
    assert (first.rows, first.checkpoint) == (5, 1)
    assert writer.pre_commit(CheckpointId(2)) == []
    writer.write(ROWS)
    (third,) = writer.pre_commit(CheckpointId(3))
    assert third.rows == 3
    committer = DiscardSink().committer(CommitterContext("j", "out", "j.out", AttemptId(1)))
    assert committer.commit(first) == Committed()
    assert committer.in_doubt() == ()
