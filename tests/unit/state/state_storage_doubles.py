"""Checkpoint storage in memory, for tests: checks what it reads, and that names are used once."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from onceflow.core.errors import CheckpointCorrupt
from onceflow.core.state import StateHandle


def _handle(
    name: str, path: str, data: bytes, key_groups: range | None, shared: bool = False
) -> StateHandle:
    first, last = (0, -1) if key_groups is None else (key_groups.start, key_groups.stop - 1)
    digest = hashlib.sha256(data).hexdigest()
    return StateHandle(name, path, len(data), digest, first, last, shared)


class MemoryStorage:
    """A `StateWriter` and `StateReader` over a dict; small pieces are held inline."""

    def __init__(self, inline_bytes_max: int = 100) -> None:
        self.files: dict[str, bytes] = {}
        self.written: list[str] = []
        self._inline_bytes_max = inline_bytes_max

    def write(
        self, name: str, data: bytes | memoryview | pa.Buffer, *, key_groups: range | None = None
    ) -> StateHandle:
        raw = bytes(data)
        handle = _handle(name, f"f{len(self.written)}/{name}", raw, key_groups)
        if len(raw) <= self._inline_bytes_max:
            return dataclasses.replace(handle, path="", inline=raw)
        self.files[handle.path] = raw
        self.written.append(name)
        return handle

    def write_chunks(
        self,
        name: str,
        chunks: Iterable[pa.Buffer],
        *,
        shared: bool = False,
        key_groups: range | None = None,
    ) -> StateHandle:
        raw = b"".join(map(bytes, chunks))
        return (
            self._share(name, raw, key_groups)
            if shared
            else self.write(name, raw, key_groups=key_groups)
        )

    def write_file(
        self, name: str, path: Path, *, shared: bool, key_groups: range | None = None
    ) -> StateHandle:
        raw = path.read_bytes()
        if shared:
            return self._share(name, raw, key_groups)
        place = f"f{len(self.written)}/{name}"
        self.files[place] = raw
        self.written.append(name)
        return _handle(name, place, raw, key_groups)

    def _share(self, name: str, raw: bytes, key_groups: range | None) -> StateHandle:
        place = f"shared/{name}"
        assert place not in self.files, f"shared file {name} is written twice"
        self.files[place] = raw
        self.written.append(name)
        return _handle(name, place, raw, key_groups, shared=True)

    def read(self, handle: StateHandle) -> bytes:
        data = handle.inline if not handle.path else self.files.get(handle.path)
        if data is None or hashlib.sha256(data).hexdigest() != handle.checksum:
            raise CheckpointCorrupt(f"{handle.path} is not what was written")
        return data

    def head(self, handle: StateHandle) -> bytes:
        return self.read(handle)

    def read_to(self, handle: StateHandle, path: Path) -> None:
        assert not path.exists()
        path.write_bytes(self.read(handle))
