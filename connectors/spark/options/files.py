"""The options of `onceflow-files` for reading.

The options for writing are declared in sinks/files/sink.py, as fields with `option(…,
spark="name")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onceflow.connectors.spark.options.option_table import OptionTable
from onceflow.core.spi.options import ValueKind, option, option_of
from onceflow.core.storage.filesystems.file_location import Publish
from onceflow.sinks.files import FileSink
from onceflow.sinks.files.published import PublishedTable

_STORAGE = "Any argument of fsspec's file system, with `storage.` before its name"
FILES_WRITE = OptionTable(
    format="onceflow-files",
    direction="write",
    description=FileSink,
    helps={
        "storage_options": _STORAGE,
        "roll_bytes": "Size in bytes at which a file is closed and the next one begins. A file may"
        " be larger by one row group. The end of a micro-batch or a `save` closes all files anyway",
        "max_open_files": "How many files one task keeps open, one for each partition. With more"
        " partitions, files get smaller",
    },
)

LATEST = "latest"


def parse_checkpoint(text: str) -> int | str:
    """Return the number of a checkpoint, or `latest`."""
    return LATEST if text.strip().lower() == LATEST else int(text)


CHECKPOINT = ValueKind("the number of a checkpoint, or latest", parse_checkpoint)


@dataclass(frozen=True, kw_only=True)
class FilesRead:
    """The files of a table to read, and the checkpoint up to which they are read."""

    url: str = field(
        repr=False,
        metadata=option("The directory that a sink writes to", spark="path", secret=True),
    )
    as_of_checkpoint: int | str | None = field(
        default=None,
        metadata=option(
            "`read` only: reads the files up to this checkpoint, or up to the `latest` checkpoint"
            " that all subtasks have published. Unless given, all committed files",
            CHECKPOINT,
            spark="asOfCheckpoint",
        ),
    )
    publish: Publish = field(default="auto", metadata=option_of(FileSink, "publish"))
    storage_options: Mapping[str, Any] = field(
        default_factory=dict[str, Any],
        repr=False,
        metadata=option_of(FileSink, "storage_options"),
    )
    sink_id: str | None = None
    """The sink id whose files are read, an option of the protocol; None: all sinks."""

    @property
    def table(self) -> PublishedTable:
        """The table of files."""
        return PublishedTable(
            self.url,
            sink_id=self.sink_id,
            publish=self.publish,
            storage_options=self.storage_options,
        )


FILES_READ = OptionTable(
    format="onceflow-files",
    direction="read",
    description=FilesRead,
    helps={"storage_options": _STORAGE},
)
