"""Publishes, deletes and lists what writers staged; from any process, by the transaction's name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime

from typing_extensions import override

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.protocol.committables import (
    AbortOutcome,
    CommitOutcome,
    Committable,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import Committer, CommitterContext
from onceflow.sinks.files.layout import SinkPaths
from onceflow.sinks.files.publication import PublicationBegun
from onceflow.sinks.files.settings import FileSettings
from onceflow.sinks.files.target import publication

_logger = logging.getLogger("onceflow.sinks.files")


class FileCommitter(Committer):
    """Commits by name alone: who wrote, where, and how often it is asked do not matter."""

    def __init__(self, settings: FileSettings, context: CommitterContext) -> None:
        """Connect to nothing yet."""
        self._sink_id = context.sink_id
        self._paths = SinkPaths(context.sink_id)
        self._store = settings.target.open()
        self._publication = publication(self._store, self._paths)
        self._pruned_before = CheckpointId(0)

    @override
    def commit(self, committable: Committable) -> CommitOutcome:
        """Return how it ended; publishing goes on where another process, or a crash, left it.

        Unknown means that some files of the transaction may be visible and the rest not yet.
        """
        try:
            return self._publication.commit(committable.transaction)
        except PublicationBegun as error:
            return Unknown(str(error))
        except (SinkError, ConfigError) as error:
            return RetryLater(str(error))

    @override
    def abort(self, committable: Committable) -> AbortOutcome:
        """Return how it ended; a publication that has begun is finished, and told as committed."""
        try:
            return self._publication.abort(committable.transaction)
        except PublicationBegun as error:
            return Unknown(str(error))
        except (SinkError, ConfigError) as error:
            return RetryLater(str(error))

    @override
    def in_doubt(self) -> Sequence[Committable]:
        """Return what is staged under exactly this sink id.

        Raises:
            SinkError: The directory cannot be listed now.
        """
        try:
            found = self._publication.in_doubt()
        except ConfigError as error:
            raise SinkError(
                f"sink {self._sink_id}: cannot tell what is in doubt: {error}"
            ) from error
        return tuple(Committable(transaction) for transaction in found)

    @override
    def prepared_at(self, committable: Committable) -> datetime | None:
        return self._publication.staged_at(committable.transaction)

    @override
    def prune(self, before: CheckpointId) -> None:
        """Delete the proofs of checkpoints before `before`, and leave a mark that says so.

        A failure is logged and nothing else: proofs do no harm, and the next call comes soon.
        """
        if before <= self._pruned_before:
            return
        try:
            if self._prune(before):
                self._pruned_before = before
        except (SinkError, ConfigError) as error:
            _logger.warning(
                "sink %s: proofs below checkpoint %s are not deleted: %s",
                self._sink_id,
                before,
                error,
            )

    @override
    def close(self) -> None:
        """Release nothing: no connection outlives a call."""

    def _prune(self, before: CheckpointId) -> bool:
        """Return whether nothing is left to prune."""
        # The mark first: whoever misses a proof must find it.
        self._store.create_if_absent(self._paths.pruned_mark(before), b"pruned")
        old = [one for one in self._publication.proven() if one.checkpoint < before]
        forgotten = [self._publication.forget(transaction) for transaction in old]
        for mark in self._store.list(self._paths.pruned):
            if mark.isdigit() and int(mark) < before:
                self._store.delete(f"{self._paths.pruned}/{mark}")
        return all(forgotten)
