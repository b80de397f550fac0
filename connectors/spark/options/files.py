"""Options of `onceflow-files`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onceflow.connectors.spark.options.tables import (
    COUNT,
    JSON_VALUE,
    NAMES,
    OptionTable,
    SparkKind,
    SparkOption,
    choice,
)
from onceflow.core.storage.filesystems.file_location import Publish
from onceflow.sinks.files import FileSink
from onceflow.sinks.files.published import PublishedTable

FILES_WRITE = OptionTable(
    format="onceflow-files",
    direction="write",
    target=FileSink,
    options=(
        SparkOption(
            "path",
            "url",
            "The directory: a path, or `s3://…` and whatever else fsspec knows",
            secret=True,
        ),
        SparkOption("fileFormat", "format", "What the files are", choice("parquet", "json")),
        SparkOption(
            "compression",
            "compression",
            "Of Parquet zstd unless given, of JSON none",
            choice("zstd", "snappy", "gzip", "lz4", "none"),
        ),
        SparkOption("partitionBy", "partition_by", "Columns that name directories", NAMES),
        SparkOption(
            "maxRecordsPerFile", "max_rows_per_file", "How many rows a file has at most", COUNT
        ),
        SparkOption("rollBytes", "roll_bytes", "After how many bytes a file is ended", COUNT),
        SparkOption(
            "maxOpenFiles", "max_open_files", "How many directories a task writes at a time", COUNT
        ),
        SparkOption(
            "publish",
            "publish",
            "How a file becomes visible",
            choice("auto", "rename", "copy"),
        ),
    ),
    clients={"storage.": "storage_options"},
    clients_kind=JSON_VALUE,
)


@dataclass(frozen=True)
class FilesRead:
    """What is read of a table of files, and as of when."""

    table: PublishedTable
    as_of_checkpoint: int | str | None


def _files_read(
    url: str,
    *,
    as_of_checkpoint: int | str | None = None,
    publish: Publish = "auto",
    storage_options: Mapping[str, Any] | None = None,
) -> FilesRead:
    table = PublishedTable(url, publish=publish, storage_options=storage_options or {})
    return FilesRead(table, as_of_checkpoint)


LATEST = "latest"


def _checkpoint(text: str) -> int | str:
    return LATEST if text.strip().lower() == LATEST else int(text)


FILES_READ = OptionTable(
    format="onceflow-files",
    direction="read",
    target=_files_read,
    options=(
        SparkOption("path", "url", "The directory that a sink writes to", secret=True),
        SparkOption(
            "asOfCheckpoint",
            "as_of_checkpoint",
            "`read` only: the files up to this checkpoint, or to the `latest` that all subtasks"
            " have published; without it all that is committed",
            SparkKind("the number of a checkpoint, or latest", _checkpoint),
        ),
        SparkOption(
            "publish",
            "publish",
            "How the sink makes files visible",
            choice("auto", "rename", "copy"),
        ),
    ),
    clients={"storage.": "storage_options"},
    clients_kind=JSON_VALUE,
)
