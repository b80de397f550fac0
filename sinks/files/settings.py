"""What writers and committers of a file sink need, resolved from what the user wrote."""

from __future__ import annotations

from dataclasses import dataclass

from onceflow.sinks.files.formats import FileFormat
from onceflow.sinks.files.target import Target


@dataclass(frozen=True, slots=True)
class FileSettings:
    """One directory of files and how to write them."""

    target: Target
    form: FileFormat
    partition_by: tuple[str, ...]
    max_rows_per_file: int | None
    roll_bytes: int
    max_open_files: int
