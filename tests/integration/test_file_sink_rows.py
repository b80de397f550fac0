"""Which rows the file sink takes, how it names their partitions, and what it refuses."""

from __future__ import annotations

import datetime as dt
import decimal
import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from tests.integration import file_sink_kit
from tests.integration.sink_kit import SCHEMA

from onceflow.core.errors import BadRow, ConfigError, PreCommitFailed
from onceflow.core.protocol.committables import (
    Committed,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow
from onceflow.sinks import FileSink


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "out"


# -- partitions ------------------------------------------------------------------------------------

_ODD = [
    "plain", "with space", "a/b", "a=b", "100%", "%2F", "?*[x]", "ü-ß-日本", "'quoted\"", "..", ".",
    "tab\t", "back\\slash", "#", "a:b", "{x}", "new\nline", "-", "__x", "C:", "emoji 🦀",
]  # fmt: skip


def test_any_text_names_a_partition_and_is_read_back(directory: Path) -> None:
    schema = pa.schema(
        [pa.field("id", pa.int64()), pa.field("name", pa.string()), pa.field("Größe%", pa.int32())]
    )
    values: list[dict[str, Any]] = [
        {"id": number, "name": name, "Größe%": number % 2}
        for number, name in enumerate([*_ODD, None])
    ]
    sink = FileSink(str(directory), partition_by=("name", "Größe%"))
    with file_sink_kit.FileJob(sink, schema=schema) as job:
        writer = job.check().writer()
        writer.write(pa.RecordBatch.from_pylist(values, schema))
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert job.committer().commit(committable) == Committed()
    partitioning = ds.partitioning(
        pa.schema([schema.field("name"), schema.field("Größe%")]), flavor="hive"
    )
    found = ds.dataset(str(directory), format="parquet", partitioning=partitioning)
    read = sorted(found.to_table().to_pylist(), key=lambda row: row["id"])
    assert [row["name"] for row in read] == [row["name"] for row in values]
    assert all(
        not name.startswith("/") and ".." not in Path(name).parts
        for name in file_sink_kit.public_files(directory)
    )


def test_partition_values_of_all_naming_types_are_read_back(directory: Path) -> None:
    schema = pa.schema(
        [
            pa.field("id", pa.int64()),
            pa.field("day", pa.date32()),
            pa.field("flag", pa.bool_()),
            pa.field("n", pa.int16()),
            pa.field("word", pa.dictionary(pa.int8(), pa.string())),
        ]
    )
    values: list[dict[str, Any]] = [
        {"id": 1, "day": dt.date(2024, 2, 29), "flag": True, "n": -1, "word": "a"},
        {"id": 2, "day": dt.date(2024, 2, 29), "flag": False, "n": 1, "word": "b"},
        {"id": 3, "day": None, "flag": None, "n": None, "word": None},
    ]
    sink = FileSink(str(directory), partition_by=("day", "flag", "n", "word"))
    with file_sink_kit.FileJob(sink, schema=schema) as job:
        writer = job.check().writer()
        writer.write(pa.RecordBatch.from_pylist(values, schema))
        (committable,) = writer.pre_commit(CheckpointId(1))
        job.committer().commit(committable)
    assert [name.rpartition("/")[0] for name in file_sink_kit.public_files(directory)] == [
        "day=2024-02-29/flag=false/n=1/word=b",
        "day=2024-02-29/flag=true/n=-1/word=a",
        "/".join(f"{name}=__HIVE_DEFAULT_PARTITION__" for name in ("day", "flag", "n", "word")),
    ]


def test_more_partitions_than_open_files_lose_nothing(directory: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("bucket", pa.int32())])
    with file_sink_kit.FileJob(
        FileSink(str(directory), partition_by=("bucket",), max_open_files=3), schema=schema
    ) as job:
        writer = job.check().writer()
        for first in range(0, 100, 20):
            ids = range(first, first + 20)
            writer.write(
                pa.record_batch(
                    [pa.array(ids, pa.int64()), pa.array([i % 10 for i in ids], pa.int32())],
                    schema=schema,
                )
            )
        (committable,) = writer.pre_commit(CheckpointId(1))
        job.committer().commit(committable)
    assert file_sink_kit.seen_ids(directory) == list(range(100))
    assert {row["id"] % 10 == row["bucket"] for row in file_sink_kit.seen_rows(directory)} == {True}


# -- bad rows --------------------------------------------------------------------------------------


def _bad() -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            {"id": 1, "account": "a", "amount": 1},
            {"id": 2, "account": "", "amount": 1},
            {"id": 3, "account": "__HIVE_DEFAULT_PARTITION__", "amount": 1},
            {"id": 4, "account": "x" * 300, "amount": 1},
            {"id": 5, "account": None, "amount": 1},
        ],
        SCHEMA,
    )


def test_row_that_cannot_name_its_partition_fails_the_job_and_leaves_nothing(
    directory: Path,
) -> None:
    with file_sink_kit.FileJob(FileSink(str(directory), partition_by=("account",))) as job:
        writer = job.check().writer()
        with pytest.raises(BadRow, match=r"partition column 'account': the value ''"):
            writer.write(_bad())
        with pytest.raises(PreCommitFailed, match="has failed before"):
            writer.pre_commit(CheckpointId(1))
        assert file_sink_kit.hidden_files(directory, "open") == []


@pytest.mark.parametrize("policy", [OnBadRow.DROP, OnBadRow.DEAD_LETTER])
def test_rows_that_cannot_name_their_partition_are_handed_back_and_the_others_written(
    directory: Path, policy: OnBadRow
) -> None:
    sink = FileSink(str(directory), partition_by=("account",))
    with file_sink_kit.FileJob(sink, on_bad_row=policy) as job:
        writer = job.check().writer()
        writer.write(_bad())
        (rejected,) = writer.take_rejected()
        assert rejected.rows.column("id").to_pylist() == [2, 3, 4]
        assert [reason.split(":")[0] for reason in rejected.reasons] == [
            "partition column 'account'"
        ] * 3
        assert list(writer.take_rejected()) == []
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert committable.rows == 2
        job.committer().commit(committable)
    assert file_sink_kit.seen_ids(directory) == [1, 5]


def test_null_in_a_column_that_has_none_is_refused(directory: Path) -> None:
    batch = pa.record_batch(
        [pa.array([None, 2]), pa.array(["a", "b"]), pa.array([1, 2])], schema=SCHEMA
    )
    with file_sink_kit.FileJob(FileSink(str(directory)), on_bad_row=OnBadRow.DROP) as job:
        writer = job.check().writer()
        writer.write(batch)
        (rejected,) = writer.take_rejected()
        assert list(rejected.reasons) == ["column 'id' is null, and may not be"]
        (committable,) = writer.pre_commit(CheckpointId(1))
        job.committer().commit(committable)
    assert file_sink_kit.seen_ids(directory) == [2]


# -- JSON ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_json_lines_hold_the_rows_and_refuse_what_json_cannot_say(
    directory: Path, compression: Any
) -> None:
    schema = pa.schema(
        [
            pa.field("id", pa.int64()),
            pa.field("x", pa.float64()),
            pa.field("tags", pa.list_(pa.struct([pa.field("w", pa.float32())]))),
            pa.field("at", pa.timestamp("us", "UTC")),
            pa.field("price", pa.decimal128(10, 2)),
            pa.field("raw", pa.binary()),
            pa.field("coded", pa.dictionary(pa.int32(), pa.float64())),
        ]
    )
    at = dt.datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=dt.timezone.utc)
    good: dict[str, Any] = {
        "id": 1, "x": 0.5, "tags": [{"w": 1.5}], "at": at,
        "price": decimal.Decimal("1.20"), "raw": b"\x00\xff", "coded": 2.5,
    }  # fmt: skip
    batch = pa.RecordBatch.from_pylist(
        [
            good,
            {**good, "id": 2, "x": float("nan")},
            {**good, "id": 3, "tags": [{"w": float("inf")}]},
            {**dict.fromkeys(good), "id": 4},
            {**good, "id": 5, "coded": float("nan")},
        ],
        schema,
    )
    sink = FileSink(str(directory), format="json", compression=compression)
    with file_sink_kit.FileJob(sink, schema=schema, on_bad_row=OnBadRow.DROP) as job:
        writer = job.check().writer()
        writer.write(batch)
        (rejected,) = writer.take_rejected()
        assert rejected.rows.column("id").to_pylist() == [2, 3, 5]
        (committable,) = writer.pre_commit(CheckpointId(1))
        job.committer().commit(committable)
    (name,) = file_sink_kit.public_files(directory)
    data = (directory / name).read_bytes()
    text = (gzip.decompress(data) if compression == "gzip" else data).decode()
    assert [json.loads(line) for line in text.splitlines()] == [
        {
            "id": 1, "x": 0.5, "tags": [{"w": 1.5}], "at": "2024-01-02T03:04:05.000006Z",
            "price": "1.20", "raw": "AP8=", "coded": 2.5,
        },
        {**dict.fromkeys(good), "id": 4},
    ]  # fmt: skip


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "orc"}, "format='orc': choose one of parquet, json"),
        ({"compression": "brotli"}, "parquet takes one of zstd"),
        ({"format": "json", "compression": "zstd"}, "json takes one of none, gzip"),
        ({"partition_by": "account"}, "takes a list"),
        ({"roll_bytes": 0}, "roll_bytes=0 must be 1 or more"),
        ({"publish": "move"}, "choose one of auto, rename, copy"),
        ({"publish": "copy"}, "files are renamed"),
    ],
)
def test_wrong_setting_is_refused_when_it_is_made(
    directory: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        FileSink(str(directory), **settings)


@pytest.mark.parametrize(
    ("settings", "schema", "message"),
    [
        ({"partition_by": ("nope",)}, SCHEMA, "partition_by names 'nope'"),
        ({"partition_by": SCHEMA.names}, SCHEMA, "names every column"),
        (
            {"partition_by": ("_x",)},
            pa.schema([pa.field("_x", pa.int8()), pa.field("y", pa.int8())]),
            "begin with '_'",
        ),
        (
            {"partition_by": ("x",)},
            pa.schema([pa.field("x", pa.float64()), pa.field("y", pa.int8())]),
            "cast it before the sink",
        ),
        ({}, pa.schema([pa.field("x", pa.int8()), pa.field("x", pa.int8())]), "several columns"),
        (
            {},
            pa.schema([pa.field("x", pa.month_day_nano_interval())]),
            "Parquet does not take column 'x'",
        ),
        ({"format": "json"}, pa.schema([pa.field("x", pa.timestamp("ns"))]), "go into JSON"),
    ],
)
def test_rows_that_never_fit_are_refused_at_start(
    directory: Path, settings: dict[str, Any], schema: pa.Schema, message: str
) -> None:
    with file_sink_kit.FileJob(FileSink(str(directory), **settings), schema=schema) as job:
        with pytest.raises(ConfigError, match=message):
            job.check()
        assert not directory.exists(), "nothing is claimed for a job that cannot start"


def test_sink_pickles_with_an_absolute_path_and_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sink = pickle.loads(pickle.dumps(FileSink("some/where")))
    assert sink.url == str(tmp_path / "some/where")
    assert FileSink((tmp_path / "x").as_uri()).url == str(tmp_path / "x")
