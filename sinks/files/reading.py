"""For readers who want transactions or checkpoints as a whole, and not file by file.

A listing of the directory may meet a transaction half published. The proofs that committers leave
tell which are whole: one is written after the last file has its name. Proofs are deleted once no
restore can ask for them, and what is older than that is whole too, in all subtasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.sinks.files.layout import SinkPaths
from onceflow.sinks.files.target import Publish, Target


@dataclass(frozen=True, slots=True)
class PublishedFiles:
    """Files that one sink id has published, each with its transaction, as of one look."""

    of_transactions: Sequence[tuple[TransactionId, str]]
    """Of wholly published transactions; paths below the url, in the order of checkpoints."""
    whole_before: CheckpointId
    """Every checkpoint before this one is published by all subtasks."""

    def paths(self) -> list[str]:
        """Return the files of wholly published transactions."""
        return [path for _, path in self.of_transactions]

    def paths_of_whole_checkpoints(self) -> list[str]:
        """Return the files of checkpoints that all subtasks have published: a consistent cut.

        Behind `paths` by as many checkpoints as the job retains.
        """
        return [
            path for found, path in self.of_transactions if found.checkpoint < self.whole_before
        ]


def committed_files(
    url: str,
    sink_id: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    publish: Publish = "auto",
) -> PublishedFiles:
    """Return the files below `url` that belong to wholly published transactions of `sink_id`.

    Files that readers have deleted are not in it. Runs anywhere, beside the running job.

    Raises:
        ConfigError: The url is wrong, or may not be listed.
        SinkError: It cannot be listed now.
    """
    store = Target.parse(url, publish=publish, options=storage_options or {}).open()
    paths = SinkPaths(sink_id)
    # In this order: a proof that is not seen any more has left its mark before it went, and files
    # that are seen with a proof were all there before the proof was.
    proven = set(paths.transactions(store.list(paths.committed)))
    marks = [int(mark) for mark in store.list(paths.pruned) if mark.isdigit()]
    whole_before = CheckpointId(max(marks, default=0))
    found: list[tuple[TransactionId, str]] = []
    for path in store.files():
        transaction = paths.transaction_of_part(path.rpartition("/")[2])
        if transaction is not None and (
            transaction in proven or transaction.checkpoint < whole_before
        ):
            found.append((transaction, path))
    found.sort(key=lambda one: (one[0].checkpoint, one[0].subtask, one[1]))
    return PublishedFiles(found, whole_before)
