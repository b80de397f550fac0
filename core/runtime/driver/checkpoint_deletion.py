"""Deletion of a cancelled job's checkpoints, if the settings do not keep them.

The decision log stays, because only the log distinguishes committed transactions from others. It
gets one more decision: a checkpoint without state and positions. A later start begins from there,
with no state.
"""

from __future__ import annotations

import time

from onceflow.core.protocol.checkpoints.snapshots import begin_anew
from onceflow.core.runtime.driver.sink_recovery import SinkRecovery
from onceflow.core.storage import ClaimedLog, JobStorage


def delete_checkpoints(log: ClaimedLog, recovery: SinkRecovery, storage: JobStorage) -> None:
    """Commit or roll back the transactions of every sink, then delete all checkpoint state files.

    Runs on the driver after all slots have ended. `log` is claimed with a new attempt number, so
    transactions that the slots prepared belong to an older attempt. A crash leaves either all
    checkpoints, or the decision that there are none; in that case the sweep of the next start
    deletes the remaining files.

    Raises:
        OnceflowError: A sink or the storage failed; the checkpoints are kept.
    """
    restored = log.view.completed[-1]
    try:
        # 1. Commit the decided transactions and roll back the others: no later start asks for them.
        recovery.open()
        recovery.recover(restored)
    finally:
        recovery.close()
    # 2. From here on there is no checkpoint.
    number, now_ms = log.view.next_checkpoint, int(time.time() * 1000)
    anew = begin_anew(restored, number, log.attempt, now_ms)
    log.append(anew)
    # 3. No record references the files any more.
    log.prune(anew.checkpoint)
    storage.sweep(log.view, log.attempt)
