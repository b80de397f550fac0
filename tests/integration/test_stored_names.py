"""Names in stored descriptions that lead out of their directory: no reader follows one.

Whoever writes to checkpoint storage decides what is committed, and may write, replace and delete no
other file. Hypothesis draws names of parts that lead elsewhere; each reader gets them as a forged
description has them.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import msgspec
import pyarrow as pa
import pytest
from deltalake import Schema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.lake_sink_kit import SINK_ID, DeltaJob, IcebergJob, one

from onceflow.core.decoding import UnsafeName, resolve_stored_name
from onceflow.core.errors import CheckpointCorrupt, OnceflowError, SinkError
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.state.rocksdb.snapshots import Manifest, download_copy
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.core.storage.filesystems.local import LocalFileSystem
from onceflow.core.storage.layout import JobPaths
from onceflow.core.storage.snapshots.state_files import discard
from onceflow.sinks.delta.data_files import DeltaFile, decode_files, encode_files
from onceflow.sinks.delta.layout import TableLayout
from onceflow.sinks.files.layout import SinkPaths, name_of
from onceflow.sinks.files.publication import (
    ManifestFile,
    TransactionManifest,
    open_files,
    publication,
)
from onceflow.sinks.iceberg.staged_files import decode_files as decode_iceberg_files

_drawn = settings(
    max_examples=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
_PARTS = ("..", ".", "", "a", "victim", "link", "open", "_onceflow", "\0", "part-x.parquet")


@st.composite
def _names(draw: st.DrawFn) -> str:
    parts = draw(st.lists(st.sampled_from(_PARTS), min_size=1, max_size=5))
    return "/".join(parts)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory with a link that leads out of it, beside a file that is no job's."""
    (tmp_path / "victim").write_text("untouched")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "victim").write_text("untouched")
    place = tmp_path / "place"
    place.mkdir()
    (place / "link").symlink_to(tmp_path / "outside")
    return place


def _is_untouched(place: Path) -> bool:
    victims = [place.parent / "victim", place.parent / "outside" / "victim"]
    outside = sorted(path.name for path in (place.parent / "outside").iterdir())
    return all(path.read_text() == "untouched" for path in victims) and outside == ["victim"]


@_drawn
@given(name=_names())
def test_a_name_is_refused_or_leads_to_a_place_inside(name: str, place: Path) -> None:
    try:
        resolve_stored_name(name, place)
    except UnsafeName:
        return
    assert (place / name).resolve().is_relative_to(place.resolve())


@_drawn
@given(name=_names())
def test_no_file_of_a_restored_database_is_written_elsewhere(name: str, place: Path) -> None:
    directory = place / f"db-{len(list(place.iterdir()))}"
    small = Manifest(1, 8, 0, 8, (), {}, {name: b"forged"})
    with suppress(CheckpointCorrupt, OSError):
        download_copy(cast("Any", None), small, {}, directory)
    assert _is_untouched(place)
    assert all(path.parent == directory for path in directory.rglob("*"))
    large = Manifest(1, 8, 0, 8, (), {f"../{name}": "handle"}, {})
    with pytest.raises(CheckpointCorrupt, match="leads out of its directory"):
        handle = StateHandle("handle", "a", 1, "")
        download_copy(cast("Any", None), large, {"handle": handle}, directory / "other")


@_drawn
@given(name=_names())
def test_no_state_handle_deletes_a_file_elsewhere(name: str, place: Path) -> None:
    fs = LocalFileSystem(str(place.parent))
    handle = StateHandle("state", name, 1, "")
    with suppress(OnceflowError):
        discard(fs, JobPaths("place"), [handle])
    assert _is_untouched(place)


@_drawn
@given(staged=_names(), path=_names())
def test_no_manifest_of_files_replaces_or_deletes_a_file_elsewhere(
    staged: str, path: str, place: Path
) -> None:
    paths = SinkPaths("job.files")
    transaction = TransactionId("job.files", AttemptId(1), CheckpointId(1), 0, 0)
    fs = open_files(FileLocation.parse(str(place), publish="auto", options={}))
    names = [(staged, path), (staged, paths.part(transaction, 0, "0" * 12, "parquet"))]
    names += [(f"{paths.open}/1-0-ab-0", path), ("../victim", path), (staged, "../victim")]
    hidden = place / paths.staged
    hidden.mkdir(parents=True, exist_ok=True)
    for given_staged, given_path in names:
        manifest = TransactionManifest(
            transaction=str(transaction),
            staged_at=datetime.now(timezone.utc),
            files=(ManifestFile(staged=given_staged, path=given_path, rows=1, size_bytes=9),),
        )
        for act in ("commit", "abort"):
            (hidden / name_of(transaction)).write_bytes(msgspec.json.encode(manifest))
            with pytest.raises(OnceflowError):
                getattr(publication(fs, paths), act)(transaction)
            assert _is_untouched(place)


@_drawn
@given(name=_names())
def test_no_description_of_a_delta_sink_names_another_file(name: str) -> None:
    with pytest.raises(SinkError, match="damaged"):
        layout = TableLayout(Schema([]), [])
        decode_files(encode_files("id", layout, [DeltaFile(name, 1, {}, "{}")]), SINK_ID)


@pytest.mark.parametrize("kind", [IcebergJob, DeltaJob], ids=["iceberg", "delta"])
def test_an_aborted_description_deletes_no_file_that_the_sink_has_not_written(
    kind: type[IcebergJob | DeltaJob], tmp_path: Path
) -> None:
    job = kind(tmp_path).open()
    victim = tmp_path / "victim.parquet"
    victim.write_text("untouched")
    committable = job.prepare(1, one(1))
    parts = list(job.staging.read(committable.transaction) or ())
    ((_, description),) = parts
    forged = _forge(kind, description, victim)
    job.staging.discard(committable.transaction)
    staged = job.staging.open()
    staged.write(forged)
    staged.seal(committable.transaction)
    staged.close()
    with job.committer() as committer:
        assert "damaged" in str(committer.abort(committable))
        assert "damaged" in str(committer.commit_checkpoint(CheckpointId(1), [committable]))
    assert victim.read_text() == "untouched"


def _forge(
    kind: type[IcebergJob | DeltaJob], description: pa.RecordBatch, victim: Path
) -> pa.RecordBatch:
    """Return `description` with the path of its data file replaced by that of `victim`."""
    row = description.to_pylist()[0]
    if kind is DeltaJob:
        files = msgspec.json.decode(row["files"])
        files[0]["path"] = "../victim.parquet"
        return pa.RecordBatch.from_pylist(
            [{**row, "files": msgspec.json.encode(files)}], schema=description.schema
        )
    ((file,),) = [files.files for files in decode_iceberg_files([description])]
    given, other = file.file_path.encode(), f"file://{victim}".encode()
    # An Avro string is its length, zigzag in base 128, and its bytes.
    manifest = row["manifest"]
    assert _to_avro_length(given) + given in manifest
    forged = manifest.replace(_to_avro_length(given) + given, _to_avro_length(other) + other)
    return pa.RecordBatch.from_pylist(
        [{**row, "manifest": _resize_block(manifest, forged)}], schema=description.schema
    )


def _to_avro_length(text: bytes) -> bytes:
    return _to_varint(len(text) * 2)


def _to_varint(number: int) -> bytes:
    octets = bytearray()
    while number > 0x7F:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*octets, number])


def _resize_block(given: bytes, forged: bytes) -> bytes:
    """Return `forged` with the size of its only block as it is now."""
    sync = given[-16:]
    head, _, block = given.partition(sync)
    size = len(block) - 16
    count = _to_varint(2)
    while True:
        prefix = count + _to_varint(2 * (size - len(count) - len(_to_varint(2 * size))))
        if block.startswith(prefix):
            break
        size -= 1
        assert size > 0
    rows = forged.partition(sync)[2][len(prefix) : -16]
    return head + sync + count + _to_varint(2 * len(rows)) + rows + sync
