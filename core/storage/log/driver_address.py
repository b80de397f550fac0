"""Where the driver of a job can be asked, as a running driver leaves it in checkpoint storage.

    <job>/driver.json     the address; no secret
    <job>/driver.token    what every request must show; readable by the owner alone

A driver that ends deletes its own. One that is killed leaves them: whoever asks finds nobody there,
or somebody who is not this instance. A later driver of the job replaces them.
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
    """One driver process, from its claim of the job to its end."""

    job: str
    instance: str
    """Drawn by the process; every request names it, so that nobody else answers."""
    url: str
    host: str
    """The machine, for people."""
    pid: int
    since_ms: int
    loopback: bool
    """Whether it can be asked on its own machine alone."""
    authority: str = ""
    """PEM file on the driver's machine of who has signed its certificate."""
    format: int = FORMAT


class AddressFiles:
    """Reads, writes and deletes them. Any thread, any process."""

    def __init__(self, fs: FileSystem, private: FileSystem, paths: JobPaths) -> None:
        self._fs = fs
        self._address = JsonFile(fs, paths.driver, DriverAddress, "a driver's address")
        self._private = private
        """The same files; what it writes, only the owner may read."""
        self._paths = paths

    def read(self) -> DriverAddress | None:
        """Return the address; None: no driver runs that has left one.

        Raises:
            CheckpointCorrupt: It is no address.
        """
        return self._address.read()

    def read_token(self) -> str | None:
        """Return the token that is in checkpoint storage; None when there is none."""
        data = self._private.read(self._paths.driver_token)
        return None if data is None else data.decode("ascii", "replace").strip()

    def write(self, address: DriverAddress, token: str | None) -> None:
        """Leave `address` and `token`. None if the token is kept elsewhere.

        Then the token of an earlier driver is deleted, so that no client shows that one.
        """
        if token is None:
            self._fs.delete_quietly(self._paths.driver_token)
        else:
            self._private.write(self._paths.driver_token, (token.encode(),))
        self._address.write(address)

    def remove(self, instance: str) -> None:
        """Delete them if they are still those of `instance`. Never raises."""
        with contextlib.suppress(StorageError, CheckpointCorrupt):
            address = self.read()
            if address is not None and address.instance == instance:
                self._fs.delete_quietly(self._paths.driver)
                self._fs.delete_quietly(self._paths.driver_token)
