"""The record of a query's first sink, whose database keeps the decisions of all sinks.

With another sink first, the decisions would not be found. A repeated batch would be written again,
and decided transactions would be rolled back.

The file is <checkpoint>/onceflow/first_sink. It has the sink's name, and is written before the
first decision.
"""

from __future__ import annotations

from dataclasses import dataclass

from onceflow.core.errors import ConfigError
from onceflow.core.spi.batch_decisions import BatchDecisions
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.core.storage.filesystems.local import CHECKPOINT_STORAGE

_FILE = "first_sink"


@dataclass(frozen=True, slots=True)
class FirstSink:
    """The first sink in the checkpoint and in the program. Any process of the driver may use it."""

    directory: str
    name: str

    def require(self, decisions: BatchDecisions) -> None:
        """Raise ConfigError unless the first sink is the same as before, in the same location.

        `decisions` are those that would be used. Changes nothing.

        Raises:
            ConfigError: Another sink is first, or its database has no decision.
            SinkError, StorageError: The target or the checkpoint cannot be read now.
        """
        noted = self._record_location.open(CHECKPOINT_STORAGE).read(_FILE)
        if noted is None:
            return
        first = noted.decode()
        if first != self.name:
            raise ConfigError(
                f"foreach_batch names sink {self.name!r} first, and the decisions of this query are"
                f" kept with sink {first!r}: name {first!r} first, with the sink that it was. With"
                f" another one batches would be written twice ({self._where})"
            )
        written, reason = "none", ""
        try:
            if decisions.read_claim().attempt > 0:
                return
        except ConfigError as error:
            written, reason = "others", f" ({error})"
        raise ConfigError(
            f"the decisions of this query are kept with sink {first!r}, its first, and where that"
            f" one writes now there are {written}{reason}: it is another database, or its own"
            " tables (onceflow_sinks, onceflow_batches) are gone. Name the one in which"
            f" they are; or begin with a new checkpoint where the rows end ({self._where})"
        )

    def note(self) -> None:
        """Record the first sink before anything is decided. Idempotent.

        Raises:
            StorageError: The checkpoint cannot be written.
        """
        files = self._record_location.open(CHECKPOINT_STORAGE)
        # An existing name stays: earlier decisions were stored under it.
        if files.read(_FILE) is None:
            files.make_directory("")
            files.write(_FILE, [self.name.encode()])

    @property
    def _record_location(self) -> FileLocation:
        return FileLocation.parse(self.directory, publish="auto", options={})

    @property
    def _where(self) -> str:
        return f"noted in {self._record_location}/{_FILE}"
