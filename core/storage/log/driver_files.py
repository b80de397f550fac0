"""The small files in which a job's driver describes itself: its address, its token, its last state.

No decision depends on it. It is written as a whole, and read by other processes.

    <job>/driver.json     the address; no secret
    <job>/driver.token    the token of every request; only the owner may read it

A driver that ends deletes its own files. A driver that is killed leaves them: a client then reaches
no process, or one with another instance id. A later driver of the job replaces the files.

    <job>/last_run.json   written by a driver once it owns the job, and again when it ends

A driver that is killed leaves a record that says "running". No decision depends on this file: the
progress of the job is in the decision log.
"""

from __future__ import annotations

import contextlib
import re
from typing import Generic, TypeVar

import msgspec

from onceflow.core.decoding import json_decoder
from onceflow.core.errors import CheckpointCorrupt, StorageError
from onceflow.core.storage.filesystems.filesystem import FileSystem
from onceflow.core.storage.layout import JobPaths

_T = TypeVar("_T", bound=msgspec.Struct)


class JsonFile(Generic[_T]):
    """Reads and writes one JSON file. Any thread, any process."""

    def __init__(self, fs: FileSystem, path: str, kind: type[_T], what: str) -> None:
        """Set up the file. `what` describes its content in error messages."""
        self._fs = fs
        self._path = path
        self._kind = kind
        self._what = what

    def read(self) -> _T | None:
        """Return the content, or None if there is no file.

        Raises:
            CheckpointCorrupt: The file does not hold a value of the expected type.
        """
        data = self._fs.read(self._path)
        if data is None:
            return None
        try:
            return json_decoder(self._kind).decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointCorrupt(
                f"{self._fs.location(self._path)} is not {self._what}: {error}; delete it, and"
                " the job's next driver will write it again"
            ) from error

    def write(self, value: _T) -> None:
        """Replace the file's content with `value`."""
        self._fs.write(self._path, (msgspec.json.encode(value),))


EXPECTED_FORM = "one line of 16 to 512 ASCII characters without spaces"
"""A description of the form, for error messages."""
_TOKEN = re.compile(r"[!-~]{16,512}")


def is_token(text: str) -> bool:
    """Return True if `text` has EXPECTED_FORM. Such a text cannot end a header line early."""
    return _TOKEN.fullmatch(text) is not None


FORMAT = 1


class DriverAddress(msgspec.Struct, frozen=True):
    """The address of a driver process, from its claim of the job to its end."""

    job: str
    instance: str
    """A random id of the process. Each request names it, so that no other process answers."""
    url: str
    host: str
    """The machine's name, for people."""
    pid: int
    since_ms: int
    loopback: bool
    """True if only clients on the same machine can reach the driver."""
    authority: str = ""
    """A PEM file on the driver's machine: the authority that has signed its certificate."""
    format: int = FORMAT


class AddressFiles:
    """Reads, writes and deletes the address and the token. Any thread, any process."""

    def __init__(self, fs: FileSystem, private: FileSystem, paths: JobPaths) -> None:
        self._fs = fs
        self._address = JsonFile(fs, paths.driver, DriverAddress, "a driver's address")
        self._private = private
        """The same files; only their owner may read what is written through this object."""
        self._paths = paths

    def read(self) -> DriverAddress | None:
        """Return the address, or None if no running driver has written one.

        Raises:
            CheckpointCorrupt: The file does not hold an address.
        """
        return self._address.read()

    def read_token(self) -> str | None:
        """Return the token in checkpoint storage, or None if there is none."""
        data = self._private.read(self._paths.driver_token)
        return None if data is None else data.decode("ascii", "replace").strip()

    def write(self, address: DriverAddress, token: str | None) -> None:
        """Write `address` and `token`. `token` is None if it is kept elsewhere.

        If it is None, the token of an earlier driver is deleted, so that clients do not send that
        one.
        """
        if token is None:
            self._fs.delete_quietly(self._paths.driver_token)
        else:
            self._private.write(self._paths.driver_token, (token.encode(),))
        self._address.write(address)

    def remove(self, instance: str) -> None:
        """Delete the address and the token if they belong to `instance`.

        Ignores storage errors and a corrupt address.
        """
        with contextlib.suppress(StorageError, CheckpointCorrupt):
            address = self.read()
            if address is not None and address.instance == instance:
                self._fs.delete_quietly(self._paths.driver)
                self._fs.delete_quietly(self._paths.driver_token)


ERROR_LENGTH_MAX = 4_000


class LastRun(msgspec.Struct, frozen=True):
    """The record of a driver process, from its claim of the job to its end."""

    run: str
    """A random id of the driver: an overtaken driver must not replace its successor's record."""
    state: str
    """`running` until the driver has ended; then the job's last state: `stopped`, `failed`, …"""
    host: str
    pid: int
    began_ms: int
    ended_ms: int = 0
    attempt: int = 0
    error: str = ""
    """The reason why the job failed."""
    format: int = FORMAT


class LastRunFile:
    """Reads and writes the record of the last run. Any thread, any process."""

    def __init__(self, fs: FileSystem, paths: JobPaths) -> None:
        """Set up the file.

        `fs` must write files that only the owner may read: errors quote records.
        """
        self._file = JsonFile(fs, paths.last_run, LastRun, "the record of a run")

    def read(self) -> LastRun | None:
        """Return the record, or None if no driver has written one yet.

        Raises:
            CheckpointCorrupt: The file is not a valid record.
        """
        return self._file.read()

    def begin(self, run: LastRun) -> None:
        """Write that a driver owns the job."""
        self._file.write(run)

    def end(self, run: LastRun) -> None:
        """Write how the driver has ended, unless another driver owns the job by now."""
        recorded = self.read()
        if recorded is None or recorded.run == run.run:
            self._file.write(run)
