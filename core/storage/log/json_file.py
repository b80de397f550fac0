"""A small JSON file beside a job's log, which says something of one driver process.

Nothing is decided by such a file. It is written whole, and read by other processes.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from onceflow.core.errors import CheckpointCorrupt
from onceflow.core.msgspec_decoders import json_decoder
from onceflow.core.storage.filesystems.filesystem import FileSystem

_T = TypeVar("_T", bound=msgspec.Struct)


class JsonFile(Generic[_T]):
    """Reads and writes it. Any thread, any process."""

    def __init__(self, fs: FileSystem, path: str, kind: type[_T], what: str) -> None:
        """`what` it holds is for errors."""
        self._fs = fs
        self._path = path
        self._kind = kind
        self._what = what

    def read(self) -> _T | None:
        """Return what it holds; None: there is no file.

        Raises:
            CheckpointCorrupt: It holds something else.
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
        """Write `value` over what is there."""
        self._fs.write(self._path, (msgspec.json.encode(value),))
