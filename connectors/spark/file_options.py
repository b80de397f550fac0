"""Options of `onceflow-files`."""

from __future__ import annotations

from onceflow.connectors.spark.options import (
    COUNT,
    JSON_VALUE,
    NAMES,
    Option,
    OptionTable,
    choice,
)
from onceflow.sinks.files import FileSink

FILES_WRITE = OptionTable(
    format="onceflow-files",
    direction="write",
    target=FileSink,
    options=(
        Option(
            "path",
            "url",
            "The directory: a path, or `s3://…` and whatever else fsspec knows",
            secret=True,
        ),
        Option("fileFormat", "format", "What the files are", choice("parquet", "json")),
        Option(
            "compression",
            "compression",
            "Of Parquet zstd unless given, of JSON none",
            choice("zstd", "snappy", "gzip", "lz4", "none"),
        ),
        Option("partitionBy", "partition_by", "Columns that name directories", NAMES),
        Option("maxRecordsPerFile", "max_rows_per_file", "How many rows a file has at most", COUNT),
        Option("rollBytes", "roll_bytes", "After how many bytes a file is ended", COUNT),
        Option(
            "maxOpenFiles", "max_open_files", "How many directories a task writes at a time", COUNT
        ),
        Option(
            "publish",
            "publish",
            "How a file becomes visible",
            choice("auto", "rename", "copy"),
        ),
    ),
    prefix="storage.",
    prefix_argument="storage_options",
    prefix_kind=JSON_VALUE,
)
