"""Files: Parquet or JSON on any file system, hidden until their checkpoint is decided."""

from __future__ import annotations

from onceflow.sinks.files.publication import PublishedFiles, list_committed_files
from onceflow.sinks.files.sink import FileSink

__all__ = ["FileSink", "PublishedFiles", "list_committed_files"]
