"""The runs of a query, in the order in which they began, noted in its checkpoint.

    <checkpoint>/onceflow/runs/<number>-<digest>    the name of the driver

A driver notes itself before its first claim, with the number after the highest one. While a later
note is there, the driver was overtaken: it stood still, and must not claim again. The processes in
which Spark plans do not live as long as the driver, so the note stands in files.
"""

from __future__ import annotations

import hashlib

from onceflow.core.errors import Fenced
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.core.storage.filesystems.local import CHECKPOINT_STORAGE

_DIRECTORY = "onceflow/runs"
_RETAINED = 50
"""The maximum number of records. A driver whose record was deleted counts as a new run."""


class QueryRuns:
    """The records of one query, for the driver `name`. Any process of the driver may use it."""

    def __init__(self, checkpoint: str, name: str) -> None:
        """Parse the location. Accesses no file."""
        location = FileLocation.parse(checkpoint, publish="auto", options={})
        self._files = location.open(CHECKPOINT_STORAGE)
        self._name = name
        self._digest = hashlib.sha256(name.encode()).hexdigest()[:16]

    def require_newest(self) -> None:
        """Record this driver if it has no record yet.

        Raises:
            Fenced: Another driver has started after this one. The message names it. This driver's
                record is deleted, so the next start of the query in this driver is a new run.
            StorageError: The records cannot be read or written.
        """
        notes = self._notes()
        own = max((number for number, digest in notes if digest == self._digest), default=None)
        number, digest = max(notes, default=(0, ""))
        if own is None:
            self._files.create_if_absent(self._path(number + 1, self._digest), self._name.encode())
            for old in notes[:-_RETAINED]:
                self._files.delete_quietly(self._path(*old))
        elif digest != self._digest:
            newer = self._files.read(self._path(number, digest)) or b"another driver"
            self.forget()
            raise Fenced(
                f"this run of the query is fenced: another one has begun since, in"
                f" {newer.decode('utf-8', 'replace')}. That"
                " one goes on, and nothing of this batch is written. If it has ended, start the"
                " query again"
            )

    def forget(self) -> None:
        """Delete the records of this driver, so that its next start of the query is a new run."""
        for number, digest in self._notes():
            if digest == self._digest:
                self._files.delete_quietly(self._path(number, digest))

    def _notes(self) -> list[tuple[int, str]]:
        names = (name.partition("-") for name in self._files.list(_DIRECTORY))
        return sorted((int(number), digest) for number, _, digest in names if number.isdecimal())

    def _path(self, number: int, digest: str) -> str:
        return f"{_DIRECTORY}/{number}-{digest}"
