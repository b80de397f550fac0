"""The location of a Delta table, and the access to it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from onceflow.core.imports import naming_extras
from onceflow.core.secret_references import follow_references
from onceflow.sinks.lake.table import library_errors

if TYPE_CHECKING:  # a program without the extra gets an error that names it
    from deltalake import DeltaTable
    from pyarrow.fs import FileSystem

_DEADLINES = {"connect_timeout": "5s", "timeout": "30s", "retry_timeout": "30s"}
"""The deadlines of a request to object storage and of its repetitions. Without an answer a call
then waits for a minute: half of `commit_deadline_s`. The library's own deadlines repeat for three
minutes, in which a job would not report why it does not start."""


@dataclass(frozen=True)
class TableLocation:
    """A table: a directory, or a prefix of a bucket."""

    url: str
    storage_options: Mapping[str, str] = field(repr=False)
    """The options under deltalake's names; values may refer to secrets."""

    def __str__(self) -> str:
        return f"Delta table {self.url}"

    @property
    def directory(self) -> Path | None:
        """The directory, or None if the table is not in a file system."""
        return None if "://" in self.url else Path(self.url)

    def resolve_options(self) -> dict[str, str]:
        """Return the options, with secrets resolved and with deadlines.

        Raises:
            ConfigError: A reference to a secret cannot be resolved here.
        """
        options = {
            name: follow_references(value, setting=f"storage option {name!r} of {self}")
            for name, value in self.storage_options.items()
        }
        given = {name.lower() for name in options}
        if self.directory is None:
            options |= {name: value for name, value in _DEADLINES.items() if name not in given}
        return options

    def require_library(self) -> None:
        """Raise MissingExtra unless deltalake is installed here."""
        with naming_extras():
            importlib.import_module("deltalake")

    def find_table(self) -> DeltaTable | None:
        """Return the newest version, or None if there is no table.

        Raises:
            SinkError: The storage cannot be asked now.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        options = self.resolve_options()
        with library_errors(f"{self} cannot be loaded"):
            try:
                return DeltaTable(self.url, storage_options=options)
            except TableNotFoundError:
                return None

    def open_files(self) -> FileSystem:
        """Return the file system whose root is the table."""
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import PyFileSystem

        return PyFileSystem(DeltaStorageHandler(self.url, self.resolve_options()))
