"""What a cancelled job leaves behind where its checkpoints are not to be kept.

The decision log stays, for it alone tells committed from not committed: it gets one decision more,
of a checkpoint without state and positions. A later start of the job begins anew from there.
"""

from __future__ import annotations

import time

from onceflow.core.protocol.recovery import begin_anew
from onceflow.core.runtime.driver.sink_recovery import SinkRecovery
from onceflow.core.storage import ClaimedLog, JobStorage


def delete_checkpoints(log: ClaimedLog, recovery: SinkRecovery, storage: JobStorage) -> None:
    """Have every sink commit or roll back, and delete every state file of a checkpoint.

    Runs on the driver, once all slots have ended; `log` is claimed by a number that none of them
    had, so that what they have prepared is an older attempt's. A crash leaves all checkpoints, or
    the decision that there are none; the next start's sweep deletes what is still there then.

    Raises:
        OnceflowError: A sink or the storage did not take part; the checkpoints are kept.
    """
    restored = log.view.completed[-1]
    try:
        # 1. What is decided is committed, the rest is rolled back: nothing will ask for it again.
        recovery.open()
        recovery.recover(restored)
    finally:
        recovery.close()
    # 2. From here on there is no checkpoint.
    number, now_ms = log.view.next_checkpoint, int(time.time() * 1000)
    anew = begin_anew(restored, number, log.attempt, now_ms)
    log.append(anew)
    # 3. Nothing names the files any more.
    log.prune(anew.checkpoint)
    storage.sweep(log.view, log.attempt)
