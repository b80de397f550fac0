"""The files in a query's checkpoint that identify the query, its batches and its runs.

    <checkpoint>/metadata      {"id": <query id>}, written once, before the first batch
    <checkpoint>/offsets/<n>   the start and end of batch n, written once, before n is planned
    <checkpoint>/commits/<n>   batch n is done

The highest file in `offsets` is the batch that is being planned. The batch before it is committed.

    <checkpoint>/onceflow/runs/<number>-<digest>    the name of the driver

A driver notes itself before its first claim, with the number after the highest one. While a later
note is there, the driver was overtaken: it stood still, and must not claim again. The processes in
which Spark plans do not live as long as the driver, so the note stands in files.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import msgspec

from onceflow.core.errors import Fenced, StorageError
from onceflow.core.protocol.ids import SINK_ID_LENGTH_MAX
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.core.storage.filesystems.local import CHECKPOINT_STORAGE

_DIGEST_LENGTH = 10
MICRO_BATCHES_ONLY = (
    "With trigger(continuous=…) Spark runs no micro-batches, but onceflow's formats write"
    " micro-batches: use trigger(processingTime=…) or trigger(availableNow=True)"
)


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The batch that Spark is about to run."""

    query_id: str
    number: int
    fingerprint: str
    """The SHA-256 of the batch's file of offsets."""


class CheckpointLocation:
    """The checkpoint directory of one query, read-only. Any process of the driver may use it."""

    def __init__(self, location: str) -> None:
        """Parse `location`, the option `checkpointLocation`. Accesses no file.

        Raises:
            ConfigError: The place cannot hold files.
        """
        self._place = FileLocation.parse(location, publish="auto", options={})
        self._files = self._place.open(CHECKPOINT_STORAGE)

    def __str__(self) -> str:
        return str(self._place)

    @property
    def url(self) -> str:
        """The path of a local directory, or the URL of any other place."""
        return self._place.url.rstrip("/")

    def sink_id(self) -> str:
        """Return a sink id that is unique to this location and never changes.

        It consists of the directory's name and a digest.

        A local directory has one sink id, even if it is named through links or `..`.
        """
        url, root = self.url, self._place.root
        if self._place.protocol == "file":
            # One directory with two names must have only one sink id.
            url = root = os.path.realpath(root)
        # The readable part is for people who look at prepared transactions. The digest makes the id
        # unique.
        readable = re.sub(r"[^A-Za-z0-9_.-]", "_", PurePosixPath(root).name)
        digest = hashlib.sha256(url.encode()).hexdigest()[:_DIGEST_LENGTH]
        return f"{readable[: SINK_ID_LENGTH_MAX - _DIGEST_LENGTH - 1]}-{digest}"

    def query_id(self) -> str:
        """Return the id of the query to which the checkpoint belongs.

        Raises:
            StorageError: The id cannot be read.
        """
        data = self._files.read("metadata")
        try:
            decoded: Any = msgspec.json.decode(data or b"")
            return str(decoded["id"])
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise self._unreadable() from error

    def read_planned_batch(self) -> PlannedBatch:
        """Return the batch, and its query, that is being planned.

        Raises:
            StorageError: Spark's files do not exist, or cannot be read.
        """
        query_id = self.query_id()
        numbers = self._numbers("offsets")
        # Spark writes the offsets of a batch before it plans the batch, so the highest file belongs
        # to this batch.
        data = self._files.read(f"offsets/{max(numbers)}") if numbers else None
        if data is None:
            raise self._without_offsets()
        return PlannedBatch(query_id, max(numbers), hashlib.sha256(data).hexdigest())

    def require_not_done(self, planned: PlannedBatch) -> None:
        """Raise Fenced if Spark's log has `planned` as committed, by another run.

        Raises:
            Fenced: Spark never plans a committed batch, so this run was paused meanwhile.
            StorageError: Spark's files cannot be listed.
        """
        if planned.number in self._numbers("commits"):
            raise Fenced(
                f"the checkpoint {self} records batch {planned.number} as committed, although it"
                " is still being planned: another run of the query has committed it while this"
                " run was frozen. The other run continues, and this run has written nothing of"
                " the batch. If the other run has ended, start the query again"
            )

    def batches(self) -> tuple[int | None, int | None]:
        """Return the last planned batch, and the last batch that is committed in Spark's log.

        Raises:
            StorageError: The files cannot be listed.
        """
        # List commits first: a batch that ends meanwhile was planned before.
        committed = self._numbers("commits")
        planned = self._numbers("offsets")
        return max(planned, default=None), max(committed, default=None)

    def _numbers(self, directory: str) -> list[int]:
        return [int(name) for name in self._files.list(directory) if name.isdecimal()]

    def _unreadable(self) -> StorageError:
        return StorageError(
            f"{self} has no metadata of the query, as seen from Python on the driver. The"
            " metadata has the query's id and the offsets of its batches, by which a repeated"
            " batch is recognized. If it is on another file system, give the scheme, too:"
            " file:///path, hdfs://host/path, s3://bucket/path"
        )

    def _without_offsets(self) -> StorageError:
        # The query's id was read, so this is the right file system.
        return StorageError(
            f"the checkpoint {self} has the query's id, but no offsets of the batch that is"
            f" being planned. {MICRO_BATCHES_ONLY}. If the query has another trigger, its"
            " offsets were deleted"
        )


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
                "this run of the query is fenced: another run has started since, in"
                f" {newer.decode('utf-8', 'replace')}. That run continues, and nothing of this"
                " batch is written. If it has ended, start the query again"
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
