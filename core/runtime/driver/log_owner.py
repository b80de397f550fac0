"""The driver's claims on a job's decision log, and the restore point of each attempt.

Invariants:
    nothing is decided before the targets agree with the log
    once another driver has claimed the log, every claim and append of this driver raises `Fenced`
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable

from onceflow.core.errors import StorageError
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.log.target_records import newest_attempt, require_not_behind
from onceflow.core.protocol.savepoints.savepoint import seed_view
from onceflow.core.protocol.splits import default_max_parallelism
from onceflow.core.runtime.driver.job_plan import JobPlan
from onceflow.core.runtime.driver.restore import (
    check_in_flight,
    check_max_parallelism,
    check_operators,
    check_others,
    check_settings,
    check_sinks,
    without_in_flight,
)
from onceflow.core.runtime.driver.savepoint_restore import SavepointRestore
from onceflow.core.runtime.driver.sink_recovery import SinkRecovery
from onceflow.core.runtime.driver.source_splits import genesis_of, with_discovered_splits
from onceflow.core.runtime.events.job_events import JobEvent, StateDropped
from onceflow.core.storage import ClaimedLog, JobStorage
from onceflow.core.storage.log.decision_log import draw_owner

_log = logging.getLogger("onceflow.runtime.driver")


class LogOwner:
    """Claims the log of one job for its attempts. Used by the driver's thread."""

    def __init__(
        self,
        plan: JobPlan,
        storage: JobStorage,
        restore: SavepointRestore | None,
        publish: Callable[[JobEvent], None],
    ) -> None:
        """Claim nothing yet. The first attempt starts from the savepoint `restore`, if any."""
        self._plan = plan
        self._storage = storage
        self._restore = restore
        self._publish = publish
        self._log: ClaimedLog | None = None
        self._drawn_owner = draw_owner()
        self._targets_agree = False
        """True once an attempt has compared the log with the commits of the targets."""

    @property
    def log(self) -> ClaimedLog | None:
        """The log as claimed by the last attempt; None before the first claim."""
        return self._log

    def open_recovery(self, log: ClaimedLog) -> SinkRecovery:
        """Return the recovery that makes sinks agree with `log`. Connects to no target yet."""
        plan, storage = self._plan, self._storage
        deadline_s = plan.settings.commit_deadline_s
        return SinkRecovery(
            plan.graph,
            plan.retired_sinks,
            plan.name,
            log,
            storage,
            deadline_s,
            publish=self._publish,
        )

    def sweep_storage(self, log: ClaimedLog, view: LogView) -> None:
        """Delete the files of dead attempts. Files that cannot be deleted now do no harm."""
        try:
            self._storage.sweep(view, log.attempt)
        except StorageError as error:
            _log.warning("files of ended attempts are kept until the next checkpoint: %s", error)

    def claim(self) -> ClaimedLog:
        """Claim the log for the next attempt.

        The first claim takes over the job. Later claims succeed only if no other driver has claimed
        the log since.
        """
        self._log = self._claim_first() if self._log is None else self._log.claim_again()
        return self._log

    def _claim_first(self) -> ClaimedLog:
        graph, storage = self._plan.graph, self._storage
        storage.check_creates()
        # Before the claim, because the claim records that the job uses the sink ids of this graph.
        view = storage.log.read()
        restore, drawn = self._restore, self._drawn_owner
        savepoint = restore.read_checked(view, drawn) if restore else None

        def check(view: LogView) -> None:
            check_sinks(graph, view, retired=self._plan.retired_sinks)
            if restore is not None:
                restore.check_before_claim(view, drawn)

        # Check before the claim for a clear error; `claim` repeats the check on the view it builds
        # on.
        check(seed_view(view, savepoint) if savepoint else view)
        if not view.decided:
            check_others(self._plan.name, graph, storage.others())
        sinks = [work.sink_id for _, work in graph.sinks()]
        owner = f"{socket.gethostname()}:{os.getpid()}"
        return storage.log.claim(owner, sinks, savepoint, check, drawn=drawn)

    def agree_with_targets(self, log: ClaimedLog) -> ClaimedLog:
        """Check that the log has all commits of the targets, and return the log.

        Runs before anything is decided. If a target has seen this attempt number or a higher one,
        from other storage, the log is claimed again with a number above that.

        Raises:
            StorageBehind: A target has committed what the log does not know.
            SavepointRefused: A target has committed what the savepoint does not know.
        """
        # Later attempts build on this driver's own claim: no other driver has decided since.
        if self._targets_agree:
            return log
        recovery, restore = self.open_recovery(log), self._restore
        try:
            # Query transactions in doubt before the records: a transaction that is committed in
            # between is then found in one of the two answers.
            sinks = restore.list_doubtful_sinks(log.view) if restore else frozenset[str]()
            in_doubt = recovery.list_in_doubt(sinks)
            records = recovery.ask_targets()
        finally:
            recovery.close()
        if restore is not None:
            all_tell = len(records) == recovery.target_count
            restore.check_targets(log.view, records, in_doubt, all_tell=all_tell)
        else:
            require_not_behind(log.view, records, str(self._storage.log))
        newest = newest_attempt(records)
        if newest >= log.attempt:
            log = self._log = log.claim_above(newest)
        self._targets_agree = True
        return log

    def check_owned(self) -> None:
        """Raise Fenced if another driver owns the job.

        A takeover makes attempts fail with other errors: slots leave, and a sink may have forgotten
        transactions that only this driver's log still lists. `Fenced` names the cause.

        Raises:
            CheckpointCorrupt: The log lacks this driver's own claim.
        """
        if self._log is not None:
            with contextlib.suppress(StorageError):
                self._log.check_owned()

    def find_restore_point(self, log: ClaimedLog) -> tuple[LogView, int]:
        """Return the log's view and the number of key groups.

        The last decision of the view holds every split that exists now. If necessary, this method
        decides checkpoint 0, or a checkpoint that adds splits that have appeared since the last
        one.
        """
        plan = self._plan
        now_ms = wall_ms()
        if self._restore and (begun := self._restore.begin(log, plan.max_parallelism, now_ms)):
            self._publish(begun)
        if log.view.completed:
            restored = log.view.completed[-1]
            max_parallelism = plan.max_parallelism or restored.max_parallelism
            check_max_parallelism(restored, max_parallelism)
            if not plan.allow_non_restored_state:
                check_operators(plan.graph, restored)
                check_settings(plan.graph, restored)
            restored = self._without_ignored(restored, log)
            check_in_flight(plan.graph, restored)
            grown = with_discovered_splits(plan.graph, restored, log.attempt, now_ms)
            if grown is not None:
                log.append(grown)
            return log.view, max_parallelism
        max_parallelism = plan.max_parallelism or default_max_parallelism(plan.parallelism)
        # Decide the start positions before anything is read, so that "latest" means the same after
        # a crash.
        log.append(genesis_of(plan.graph, log.attempt, plan.parallelism, max_parallelism, now_ms))
        return log.view, max_parallelism

    def _without_ignored(
        self, restored: CompletedCheckpoint, log: ClaimedLog
    ) -> CompletedCheckpoint:
        """Return `restored` without rows in flight if the user has chosen to ignore them."""
        lost = sorted({part.chain for s in restored.snapshots for part in s.in_flight})
        if not lost or restored.checkpoint != self._plan.checkpointing.ignore_in_flight_of:
            return restored
        reduced = without_in_flight(restored, log.attempt, wall_ms())
        log.append(reduced)
        number = restored.checkpoint
        rows = tuple(f"rows in flight into {chain!r} at checkpoint {number}" for chain in lost)
        self._publish(StateDropped(rows))
        return reduced


def wall_ms() -> int:
    """Return the wall-clock time in milliseconds since the epoch."""
    return int(time.time() * 1000)
