"""The start of a job from a savepoint: checked before the claim, decided before any slot begins.

The savepoint's state is copied into the job's own storage, and a new decision references the
copies. From then on nothing reads the savepoint, and every later attempt continues from the log.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from onceflow.core.crash_points import reach
from onceflow.core.errors import SavepointRefused, StorageError
from onceflow.core.protocol.ids import AttemptId, TransactionId
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.log.target_records import TargetRecord, require_not_behind
from onceflow.core.protocol.savepoints.savepoint import (
    Savepoint,
    build_first_decision,
    check_form,
    check_savepoint,
    check_targets,
    is_put_back,
    is_restored,
    lacks_own_commits,
    list_doubtful_sinks,
    sinks_to_import,
)
from onceflow.core.runtime.driver.restore import check_max_parallelism
from onceflow.core.runtime.events.job_events import SavepointRestored
from onceflow.core.storage import CheckpointStorage, ClaimedLog, JobStorage
from onceflow.core.storage.retained_checkpoints import check_not_claimed, restore_point

_log = logging.getLogger("onceflow.runtime.driver")

_GOES_ON = (
    "job %s was already started from %s, so it continues from its log, whose last checkpoint is"
    " %d, and does not go back to the savepoint. Omit from_savepoint. To start from it once"
    " more, stop the job, restore every target to its state at the savepoint, its rows together"
    " with onceflow's own tables, and start with from_savepoint and allow_rewind=True"
)


@dataclass(frozen=True, slots=True)
class RestoreFrom:
    """The savepoint to start from, and the user's permissions."""

    location: str
    claim: bool
    """True if the job takes over the savepoint: it is deleted once the job has begun from it."""
    allow_rewind: bool
    """True if rows that were committed since the savepoint may be written again."""


class SavepointRestore:
    """Starts a job from a savepoint, once: later attempts continue from the log.

    Used by the job's own thread.
    """

    def __init__(
        self,
        settings: RestoreFrom,
        storage: CheckpointStorage,
        job_storage: JobStorage,
        native_form: str,
    ) -> None:
        self._settings = settings
        self._directory = restore_point(storage, job_storage, settings.location)
        if settings.claim:
            check_not_claimed(self._directory)
        self._storage = job_storage
        self._native_form = native_form
        self._savepoint: Savepoint | None = None
        self._begun_before: Savepoint | None = None
        """The savepoint from which the job began in an earlier run; it has continued since."""
        self._last_attempt = AttemptId(0)
        """The last attempt of another driver. Attempts of this driver have rolled back
        nothing yet."""
        self._records: Sequence[TargetRecord] = ()
        self._lacks_own = False

    def read_checked(self, view: LogView, drawn: str) -> Savepoint | None:
        """Read and check the savepoint. Return None if the job has begun from it already.

        Runs before the claim, so that a refusal disturbs no running job. `drawn` is this driver's
        own part of the owner's name.

        Raises:
            SavepointRefused: The job may not begin from the savepoint.
            CheckpointCorrupt: The savepoint's metadata is damaged.
        """
        try:
            savepoint = self._directory.read()
        except SavepointRefused:
            if is_restored(view, str(self._directory)):
                return None
            raise
        if is_restored(view, str(self._directory), savepoint):
            self._last_attempt = view.attempt
            self._begun_before = savepoint
            return None
        self._savepoint = savepoint
        self.check_before_claim(view, drawn)
        return savepoint

    def check_before_claim(self, view: LogView, drawn: str) -> None:
        """Raise SavepointRefused unless a claim after `view` may begin from the savepoint.

        Another driver may have claimed the log since the savepoint was read. `drawn` is this
        driver's own part of the owner's name: the log may hold this driver's own claim although the
        driver got no answer to it.
        """
        if not view.owner.endswith(drawn):
            self._last_attempt = view.attempt
        if self._savepoint is not None:
            self._check(self._savepoint, view)

    def list_doubtful_sinks(self, view: LogView) -> frozenset[str]:
        """Return the sinks whose transactions in doubt `check_targets` needs."""
        again = self._begun_before if self._settings.allow_rewind else None
        savepoint = self._savepoint or again
        return list_doubtful_sinks(savepoint, view) if savepoint else frozenset()

    def check_targets(
        self,
        view: LogView,
        records: Sequence[TargetRecord],
        in_doubt: Collection[TransactionId],
        *,
        all_tell: bool,
    ) -> None:
        """Raise an error unless the job may begin, or continue, with targets that have `records`.

        `in_doubt` holds the transactions in doubt of the sinks from `list_doubtful_sinks`.

        Runs after the claim, before anything is decided. If the job has begun from the savepoint
        before, it continues from its log. It begins from the savepoint again if `allow_rewind` is
        set and the targets were put back.

        Raises:
            SavepointRefused: A target has committed rows since the savepoint.
            StorageBehind: The job would continue, and a target has commits that its log lacks.
        """
        again = self._begun_before
        if self._savepoint is None and again is not None:
            if self._settings.allow_rewind and is_put_back(again, view, records, in_doubt):
                self._check(again, view)
                self._savepoint = again
            else:
                _log.warning(_GOES_ON, again.job, self._directory, view.completed[-1].checkpoint)
        if self._savepoint is None:
            require_not_behind(view, records, str(self._storage.log))
            return
        check_targets(
            self._savepoint,
            view,
            records,
            all_tell=all_tell,
            allow_rewind=self._settings.allow_rewind,
        )
        self._records = records
        self._lacks_own = lacks_own_commits(self._savepoint, view, records, in_doubt)

    def begin(
        self, log: ClaimedLog, max_parallelism: int | None, now_ms: int
    ) -> SavepointRestored | None:
        """Decide that the job begins from the savepoint, unless it has begun; return the event.

        Runs after the claim, before sinks recover. A crash leaves the whole decision or none.

        Raises:
            SavepointRefused: The log has changed since the check.
            StateIncompatible: The pipeline asks for another max parallelism.
            CheckpointCorrupt: A state file of the savepoint is missing or damaged.
        """
        savepoint = self._savepoint
        if savepoint is None:
            # The driver that began the job from the savepoint may have died before deleting it.
            self._delete_claimed()
            return None
        check_max_parallelism(
            savepoint.completed, max_parallelism or savepoint.completed.max_parallelism
        )
        self._check(savepoint, log.view)
        records, lacks_own = self._records, self._lacks_own
        sinks = sinks_to_import(savepoint, log.view, records, lacks_own=lacks_own)
        self._storage.import_staged(self._directory, savepoint, sinks)
        reach("imported")
        decision = build_first_decision(
            savepoint,
            log.view,
            attempt=log.attempt,
            now_ms=now_ms,
            records=records,
            lacks_own=lacks_own,
        )
        decision = self._storage.with_state_of(decision, self._directory.reader())
        reach("copied")
        location = str(self._directory)
        log.begins_from(savepoint, location, records, lacks_own=lacks_own)
        log.append(decision)
        reach("restored")
        self._savepoint = None
        self._delete_claimed()
        return SavepointRestored(decision.checkpoint, location)

    def _delete_claimed(self) -> None:
        """Delete the savepoint if the settings claim it. The job has begun from it. Idempotent."""
        if self._settings.claim:
            try:
                self._directory.dispose()
            except StorageError as error:
                _log.warning(
                    "the claimed savepoint is no longer needed, but could not be deleted: %s", error
                )

    def _check(self, savepoint: Savepoint, view: LogView) -> None:
        check_form(savepoint, self._native_form)
        check_savepoint(
            savepoint,
            view,
            job=self._storage.job,
            log_id=self._storage.log_id if view.last_sequence else "",
            last_attempt=self._last_attempt,
            allow_rewind=self._settings.allow_rewind,
        )
