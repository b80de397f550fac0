"""The files that Spark has written into checkpoint storage for one source."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from onceflow.core.storage.filesystems.filesystem import FileSystem
from onceflow.core.storage.filesystems.local import sync_directory, sync_file


@dataclass(frozen=True, slots=True)
class InputFiles:
    """A directory of `fs`, with one directory of files for each time that Spark wrote them."""

    fs: FileSystem = field(repr=False)
    directory: str

    def make(self) -> None:
        """Create the directory. Only users of checkpoint storage may write below it."""
        self.fs.make_directory(self.directory)

    def path(self, name: str = "") -> Path:
        """Return the path of `name` on a machine that has mounted the storage."""
        return Path(self.fs.location(self.directory)) / name

    def make_durable(self, written: str) -> None:
        """Make the files in directory `written` survive a crash, whichever process wrote them."""
        directory = self.path(written)
        for path in directory.iterdir():
            sync_file(path)
        sync_directory(str(directory))
        sync_directory(str(self.path()))

    def delete(self, *, besides: Collection[str] = ()) -> None:
        """Delete all files except the directories in `besides`. Idempotent."""
        for name in self.fs.list(self.directory):
            if name not in besides:
                self.fs.delete_tree(f"{self.directory}/{name}")
        if not besides:
            self.fs.delete_tree(self.directory)
