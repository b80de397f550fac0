"""Tests what checkpoints, staged rows and the file sink need, on each file system."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from _pytest.mark.structures import ParameterSet
from tests.integration.file_sink_kit import S3Server
from tests.support.clouds import Cloud, cloud_of
from tests.support.servers.hdfs import EmbeddedHdfs

from onceflow.core.errors import StorageError
from onceflow.core.storage.filesystems import filesystem
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.core.storage.filesystems.filesystem import StreamedFiles
from onceflow.core.storage.filesystems.fsspec import RemoteDirectory
from onceflow.core.storage.filesystems.local import CHUNK_BYTES, Advice, LocalFileSystem, Modes
from onceflow.core.storage.memory_storage import MemoryFiles

WHOLE = b"whole " * 1000
SLOW = {"hdfs", "azure", "google"}
"""A JVM or a Node.js has to start."""
STREAMED = ("local", "private", "fsspec-directory", "fsspec-memory", "s3", *sorted(SLOW))
"""They fill files piece by piece, as the file sink demands. State on the heap is never a sink's."""
KINDS = (*STREAMED, "heap")
ATOMIC = tuple(kind for kind in KINDS if not kind.startswith("fsspec"))
RENAMES = ("local", "private", "fsspec-directory", "hdfs")
ADOPTS = ("local", "private")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def hdfs() -> Iterator[EmbeddedHdfs]:
    with EmbeddedHdfs() as server:
        yield server


@pytest.fixture(scope="module")
def azure() -> Iterator[Cloud]:
    cloud = cloud_of("azure")
    yield cloud
    cloud.close()


@pytest.fixture(scope="module")
def google() -> Iterator[Cloud]:
    cloud = cloud_of("google")
    yield cloud
    cloud.close()


def _opened(url: str, **options: Any) -> StreamedFiles:
    return FileLocation.parse(url, publish="auto", options=options).open(Advice())


def _parameters(kinds: Sequence[str]) -> list[ParameterSet]:
    return [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in kinds]


def _on(*kinds: str) -> pytest.MarkDecorator:
    """Have a test run over these kinds alone, where the others do not promise what it asks for."""
    return pytest.mark.parametrize("kind", _parameters(kinds), indirect=True)


@pytest.fixture(params=_parameters(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def anew(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], StreamedFiles]:
    """Return what opens the same files once more, as another process would."""
    match kind:
        case "local":
            return lambda: LocalFileSystem(str(tmp_path / "root"))
        case "private":
            return lambda: LocalFileSystem(str(tmp_path / "root"), Modes())
        case "fsspec-directory":
            return lambda: RemoteDirectory(f"file://{tmp_path}/root", "hdfs://root", {})
        case "fsspec-memory":
            return partial(_opened, f"memory://{uuid.uuid4().hex}")
        case "heap":
            heap = MemoryFiles()
            return lambda: cast("StreamedFiles", heap)
        case "hdfs":
            name_node: EmbeddedHdfs = request.getfixturevalue("hdfs")
            return partial(_opened, f"{name_node.url}/{uuid.uuid4().hex}", user="root")
        case "azure" | "google":
            cloud: Cloud = request.getfixturevalue(kind)
            monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
            for name, value in cloud.environment().items():
                monkeypatch.setenv(name, value)
            return partial(_opened, f"{cloud.bucket('lake')}/{uuid.uuid4().hex}")
        case _:
            server: S3Server = request.getfixturevalue("s3")
            return partial(_opened, server.url(uuid.uuid4().hex), **server.options)


@pytest.fixture
def fs(anew: Callable[[], StreamedFiles]) -> StreamedFiles:
    return anew()


# --- creation -------------------------------------------------------------------------------------


def test_the_first_creator_wins_and_the_second_is_shown_what_stands(
    fs: filesystem.FileSystem, anew: Callable[[], filesystem.FileSystem]
) -> None:
    assert fs.create_if_absent("log/1", b"first") == filesystem.Created()
    assert anew().create_if_absent("log/1", b"second") == filesystem.AlreadyExists(b"first")
    assert fs.read("log/1") == b"first"
    assert fs.list("log") == ("1",)
    assert fs.list_unfinished("log") == ()


def test_a_creation_that_is_repeated_shows_the_callers_own_bytes(fs: filesystem.FileSystem) -> None:
    assert fs.create_if_absent("owner", b"token") == filesystem.Created()
    assert fs.create_if_absent("owner", b"token") == filesystem.AlreadyExists(b"token")


def _create_at_once(
    fs: filesystem.FileSystem,
    path: str,
    start: threading.Barrier,
    outcomes: list[tuple[bytes, filesystem.CreateOutcome]],
    mine: bytes,
) -> None:
    start.wait()
    outcomes.append((mine, fs.create_if_absent(path, mine)))


def test_what_a_file_system_promises_is_what_it_is_tried_for(
    fs: filesystem.FileSystem, kind: str
) -> None:
    assert isinstance(fs, filesystem.CreatesAtomically) == (kind in ATOMIC)
    assert isinstance(fs, filesystem.AdoptsFiles) == (kind in ADOPTS)
    assert isinstance(fs, filesystem.Renames) == (kind in RENAMES)
    assert isinstance(fs, filesystem.Copies) == (kind in STREAMED and kind not in RENAMES)


@_on(*ATOMIC)
def test_of_many_threads_exactly_one_creates(fs: filesystem.FileSystem, kind: str) -> None:
    fs.make_directory("log")
    for round_number in range(5 if kind in ("s3", "hdfs", "azure", "google") else 40):
        start = threading.Barrier(8)
        outcomes: list[tuple[bytes, filesystem.CreateOutcome]] = []
        create = partial(_create_at_once, fs, f"log/{round_number}", start, outcomes)
        threads = [threading.Thread(target=create, args=(b"%d" % i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [mine for mine, outcome in outcomes if outcome == filesystem.Created()]
        assert len(winners) == 1
        losers = [outcome for _, outcome in outcomes if outcome != filesystem.Created()]
        assert losers == [filesystem.AlreadyExists(winners[0])] * 7
        assert fs.read(f"log/{round_number}") == winners[0]


# --- reading after writing ------------------------------------------------------------------------


def test_a_written_file_is_read_back_and_replaced_as_a_whole(
    fs: filesystem.FileSystem, anew: Callable[[], filesystem.FileSystem]
) -> None:
    assert fs.write("chk-1/a1/f", (b"one", memoryview(b"two"))) == 6
    assert anew().read("chk-1/a1/f") == b"onetwo"
    assert anew().size("chk-1/a1/f") == 6
    assert fs.write("chk-1/a1/f", (b"once",)) == 4
    assert anew().read("chk-1/a1/f") == b"once"
    assert fs.write("chk-1/a1/f", ()) == 0
    assert fs.read("chk-1/a1/f") == b""


def test_a_large_file_comes_back_in_pieces(fs: filesystem.FileSystem) -> None:
    data = os.urandom(3 * CHUNK_BYTES + 17)
    assert fs.write("f", (data[:CHUNK_BYTES], data[CHUNK_BYTES:])) == len(data)
    chunks = fs.read_chunks("f")
    assert chunks is not None
    pieces = list(chunks)
    assert len(pieces) > 1
    assert max(map(len, pieces)) <= CHUNK_BYTES
    assert b"".join(pieces) == data


def test_what_is_not_there_is_none_and_nothing(fs: filesystem.FileSystem) -> None:
    fs.write("yes/such", (b"",))
    assert fs.read("no/such") is None
    assert fs.read_chunks("no/such") is None
    assert fs.size("no/such") is None
    assert fs.find_modified_time("no/such") is None
    assert fs.list("no") == ()
    fs.delete("no/such")
    fs.delete_quietly("no/such")
    fs.delete_tree("no")
    fs.delete_directory_if_empty("no")


def test_a_path_below_a_file_is_missing(fs: filesystem.FileSystem) -> None:
    fs.write("README", (b"a file",))
    assert fs.list("README/log") == ()
    assert fs.list("README") == ()
    for path in ("README/such", "README/no/such"):
        assert fs.read(path) is None
        assert fs.read_chunks(path) is None
        assert fs.size(path) is None
        assert fs.find_modified_time(path) is None
        fs.delete(path)
        fs.delete_tree(path)
        fs.delete_directory_if_empty(path)
    assert fs.read("README") == b"a file"


def test_a_file_says_when_it_was_written(fs: filesystem.FileSystem) -> None:
    fs.write("early", (b"",))
    fs.write("late", (b"",))
    early, late = fs.find_modified_time("early"), fs.find_modified_time("late")
    assert early is not None
    assert late is not None
    assert early.tzinfo is not None
    assert early <= late


def test_a_source_that_fails_midway_leaves_no_file(fs: filesystem.FileSystem) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        yield b"more"
        raise RuntimeError("the source is gone")

    with pytest.raises(RuntimeError, match="the source is gone"):
        fs.write("chk/f", chunks())
    assert fs.read("chk/f") is None
    assert fs.list("chk") == ()
    assert fs.list_unfinished("chk") == ()


# --- listing and deleting -------------------------------------------------------------------------


def test_a_listing_has_every_name_that_stood_before_it_in_order(
    fs: filesystem.FileSystem, anew: Callable[[], filesystem.FileSystem]
) -> None:
    for name in ("b", "a/deep/er", "c", "a.b"):
        fs.write(f"log/{name}", (b"x",))
    assert anew().list("log") == ("a", "a.b", "b", "c")
    assert anew().list("") == ("log",)
    fs.delete("log/b")
    assert anew().list("log") == ("a", "a.b", "c")


def test_a_listing_of_more_names_than_a_page_holds_is_whole_and_a_tree_of_them_goes(
    fs: filesystem.FileSystem, kind: str
) -> None:
    # A page of S3's has 1,000. One of Azure's has 5,000, which Azurite takes minutes to create.
    count = 1_050 if kind in ("s3", "google") else 50
    paths = [f"many/{number:05}" for number in range(count)]
    fs.for_each(lambda path: fs.write(path, (b"x",)), paths)
    assert len(fs.list("many")) == count
    fs.delete_tree("many")
    assert fs.list("many") == ()


@pytest.mark.parametrize("name", ["a1@uid@0@x+9f.sst", "a b", "50%", "ü", "a=1,b;c", "a%2Fb", "~x"])
def test_a_name_is_what_it_was_written_as(
    fs: filesystem.FileSystem, anew: Callable[[], filesystem.FileSystem], name: str
) -> None:
    assert fs.create_if_absent(f"names/{name}", b"one") == filesystem.Created()
    assert anew().list("names") == (name,)
    assert anew().read(f"names/{name}") == b"one"
    fs.delete(f"names/{name}")
    assert anew().list("names") == ()


def test_a_deleted_tree_is_gone_with_all_in_it_and_nothing_beside_it(
    fs: filesystem.FileSystem,
) -> None:
    for name in ("chk-1/a1/f", "chk-1/a1/g", "chk-1/a2/f", "chk-10/a1/f"):
        fs.write(name, (b"x",))
    fs.delete_tree("chk-1")
    assert fs.list("chk-1") == ()
    assert fs.read("chk-1/a1/f") is None
    assert fs.read("chk-10/a1/f") == b"x"
    fs.delete_tree("chk-1")


def test_only_an_empty_directory_is_deleted_if_empty(fs: filesystem.FileSystem) -> None:
    fs.write("chk/f", (b"",))
    fs.delete_directory_if_empty("chk")
    assert fs.read("chk/f") == b""
    fs.delete("chk/f")
    fs.delete_directory_if_empty("chk")
    assert fs.list("") == ()


def test_a_directory_that_is_taken_away_is_made_again(fs: filesystem.FileSystem) -> None:
    """`discard` removes directories that are empty; a writer may be about to write there."""
    fs.write("chk-1/a1/f", (b"",))
    fs.delete_tree("chk-1")
    fs.write("chk-1/a1/g", (b"data",))
    assert fs.read("chk-1/a1/g") == b"data"


def test_each_path_is_called_and_a_failure_comes_out(fs: filesystem.FileSystem) -> None:
    for number in range(20):
        fs.write(f"open/{number}", (b"x",))
    fs.for_each(fs.delete, [f"open/{number}" for number in range(20)])
    assert fs.list("open") == ()

    def fail(path: str) -> None:
        raise StorageError(f"{path} cannot be deleted")

    with pytest.raises(StorageError, match="cannot be deleted"):
        fs.for_each(fail, ["a", "b"])


# --- files that are filled piece by piece ---------------------------------------------------------


@_on(*STREAMED)
def test_a_finished_file_has_all_its_bytes(
    fs: StreamedFiles, anew: Callable[[], StreamedFiles]
) -> None:
    file = fs.create("open/1")
    file.write(WHOLE)
    file.write(b"end")
    assert fs.finish(file, "open/1") == len(WHOLE) + 3
    fs.make_names_durable("open")
    assert anew().read("open/1") == WHOLE + b"end"
    assert anew().size("open/1") == len(WHOLE) + 3


@_on(*STREAMED)
def test_a_dropped_file_is_gone(fs: StreamedFiles, anew: Callable[[], StreamedFiles]) -> None:
    file = fs.create("open/1")
    file.write(WHOLE)
    fs.drop(file, "open/1")
    fs.drop(file, "open/1")
    del file
    assert anew().read("open/1") is None
    assert anew().list("open") == ()


@_on(*STREAMED)
def test_a_failure_in_a_block_names_the_file(fs: StreamedFiles) -> None:
    with (
        pytest.raises(StorageError, match=r"cannot write .*open/1.*No space left") as failure,
        fs.explain_failure("write", "open/1"),
    ):
        raise OSError(28, "No space left on device")
    assert fs.location("open/1") in str(failure.value)


@_on(*STREAMED)
def test_readers_of_directories_see_what_is_not_hidden(fs: StreamedFiles) -> None:
    for name in ("b=1/part.parquet", "a.json", "_onceflow/s/open/1", "b=1/.hidden", "b=1/_x"):
        fs.write(name, (b"x",))
    assert list(fs.visible_files()) == ["a.json", "b=1/part.parquet"]


@_on(*RENAMES)
def test_a_renamed_file_moves_once(fs: StreamedFiles, anew: Callable[[], StreamedFiles]) -> None:
    other = anew()
    assert isinstance(fs, filesystem.Renames)
    assert isinstance(other, filesystem.Renames)
    fs.write("staged/1", (WHOLE,))
    assert fs.rename("staged/1", "new/directory/1")
    assert not other.rename("staged/1", "new/directory/1")
    fs.make_names_durable("new/directory")
    assert other.read("new/directory/1") == WHOLE
    assert other.read("staged/1") is None


@_on(*(kind for kind in STREAMED if kind not in RENAMES))
def test_a_copied_file_is_there_twice(fs: StreamedFiles, anew: Callable[[], StreamedFiles]) -> None:
    assert isinstance(fs, filesystem.Copies)
    fs.write("staged/1", (WHOLE,))
    assert fs.copy("staged/1", "public/1")
    assert fs.copy("staged/1", "public/1")
    assert not fs.copy("staged/2", "public/2")
    assert anew().read("public/1") == WHOLE
    assert anew().read("staged/1") == WHOLE
    assert anew().read("public/2") is None


# --- files that are taken over --------------------------------------------------------------------


@_on(*ADOPTS)
def test_an_adopted_file_stays_when_its_source_goes(
    fs: filesystem.FileSystem, tmp_path: Path
) -> None:
    assert isinstance(fs, filesystem.AdoptsFiles)
    source = tmp_path / "000012.sst"
    source.write_bytes(WHOLE)
    assert fs.adopt("shared/f", source)
    source.unlink()
    assert fs.read("shared/f") == WHOLE
