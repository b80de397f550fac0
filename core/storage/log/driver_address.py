"""The address of a job's running driver, which the driver writes into checkpoint storage.

    <job>/driver.json     the address; no secret
    <job>/driver.token    the token of every request; only the owner may read it

A driver that ends deletes its own files. A driver that is killed leaves them: a client then reaches
no process, or one with another instance id. A later driver of the job replaces the files.
"""

from __future__ import annotations

import contextlib

import msgspec

from onceflow.core.errors import CheckpointCorrupt, StorageError
from onceflow.core.storage.filesystems.filesystem import FileSystem
from onceflow.core.storage.layout import JobPaths
from onceflow.core.storage.log.json_file import JsonFile

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
