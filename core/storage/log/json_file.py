"""A small JSON file in a job's directory that describes one driver process.

No decision depends on it. It is written as a whole, and read by other processes.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from onceflow.core.errors import CheckpointCorrupt
from onceflow.core.msgspec_decoders import json_decoder
from onceflow.core.storage.filesystems.filesystem import FileSystem

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
                f"{self._fs.location(self._path)} is not {self._what}: {error}; delete it, and the"
                " job's next driver writes it anew"
            ) from error

    def write(self, value: _T) -> None:
        """Replace the file's content with `value`."""
        self._fs.write(self._path, (msgspec.json.encode(value),))
