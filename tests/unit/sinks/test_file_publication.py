"""Files of a transaction become visible once, as a whole and with a proof, whatever fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

import msgspec
import pytest
from typing_extensions import override

from onceflow.core.errors import SettingsRefused, SinkError, StorageError
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    Committed,
    Lost,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.storage.filesystems import filesystem
from onceflow.core.storage.memory_storage import MemoryFiles
from onceflow.sinks.files.layout import SinkPaths, name_of
from onceflow.sinks.files.publication import (
    ByCopy,
    ByRename,
    ManifestFile,
    Publication,
    PublicationBegun,
    TransactionManifest,
    list_committed_files,
    publication,
    sink_errors,
)

PATHS = SinkPaths("job.rows")
NAME = TransactionId("job.rows", 1, 7, 0)
STAGED_AT = datetime(2026, 1, 2, tzinfo=timezone.utc)
TOKEN = "0123456789ab"
CONTENT = {"day=1": b"first", "day=2": b"second"}


class Files(MemoryFiles, filesystem.StreamedFiles):
    """Files in memory, which fail at one of the steps that change them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []
        self.fails_at = -1
        self.before: Callable[[str], object] | None = None

    def step(self, text: str) -> None:
        before, self.before = self.before, None
        try:
            if before is not None:
                before(text)
        finally:
            self.before = before
        if len(self.steps) == self.fails_at:
            self.fails_at = -1
            raise StorageError(f"no {text}")
        self.steps.append(text)

    @override
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        self.step(f"write {path}")
        return super().write(path, chunks)

    @override
    def delete(self, path: str) -> None:
        self.step(f"delete {path}")
        super().delete(path)

    @override
    def make_names_durable(self, directory: str) -> None:
        self.step(f"durable {directory}")

    @override
    def visible_files(self) -> list[str]:
        return sorted(path for path in self._files if filesystem.is_visible(path))

    @override
    def explain_failure(self, action: str, path: str) -> AbstractContextManager[None]:
        raise NotImplementedError

    @override
    def create(self, path: str) -> IO[bytes]:
        raise NotImplementedError

    @override
    def finish(self, file: IO[bytes], path: str) -> int:
        raise NotImplementedError

    @override
    def drop(self, file: IO[bytes], path: str) -> None:
        raise NotImplementedError

    def content(self) -> dict[str, bytes]:
        """Return what readers see, by directory."""
        found = {path: self.read(path) or b"" for path in self.visible_files()}
        assert all(path.endswith(".parquet") for path in found)
        return {path.partition("/")[0]: data for path, data in found.items()}

    def names(self, directory: str) -> tuple[str, ...]:
        return self.list(f"{PATHS.directory}/{directory}")


class Renaming(Files, filesystem.Renames):
    @override
    def rename(self, source: str, target: str) -> bool:
        self.step(f"rename {source} {target}")
        data = self.read(source)
        if data is None:
            return False
        MemoryFiles.write(self, target, [data])
        MemoryFiles.delete(self, source)
        return True


class Copying(Files, filesystem.Copies):
    is_whole = True

    @override
    def copy(self, source: str, target: str) -> bool:
        self.step(f"copy {source} {target}")
        data = self.read(source)
        if data is None:
            return False
        MemoryFiles.write(self, target, [data if self.is_whole else data[:-1]])
        return True


KINDS = [Renaming, Copying]


def manifest_of(name: TransactionId = NAME) -> TransactionManifest:
    files = tuple(
        ManifestFile(
            staged=PATHS.data(AttemptId(name.attempt), name.checkpoint, TOKEN, number),
            path=f"{directory}/{PATHS.part(name, number, TOKEN, 'parquet')}",
            rows=number + 1,
            size_bytes=len(data),
        )
        for number, (directory, data) in enumerate(CONTENT.items())
    )
    return TransactionManifest(transaction=str(name), staged_at=STAGED_AT, files=files)


def stage(files: Files, name: TransactionId = NAME) -> Publication:
    """Stage a transaction, and forget the steps until then."""
    published = publication(files, PATHS)
    for file, data in zip(manifest_of(name).files, CONTENT.values(), strict=True):
        files.write(file.staged, [data])
    published.stage(name, manifest_of(name))
    files.steps.clear()
    return published


def fail_at(
    step: int, files: Files, end: Callable[[TransactionId], object]
) -> StorageError | SinkError | None:
    """End the transaction while `step` fails; return the error, or None if there is none."""
    files.fails_at = step
    try:
        end(NAME)
    except (StorageError, SinkError) as error:
        return error
    finally:
        files.fails_at = -1
    return None


def assert_committed(files: Files, published: Publication) -> None:
    assert files.content() == CONTENT
    assert published.list_proven() == [NAME]
    assert published.in_doubt() == []
    assert published.files_in_doubt() == frozenset()
    assert published.find_stage_time(NAME) is None
    assert [files.names(name) for name in ("open", "staged", "publishing", "aborting")] == [()] * 4


def assert_aborted(files: Files, published: Publication) -> None:
    assert files.content() == {}
    assert published.in_doubt() == []
    assert [files.names(name) for name in ("open", "staged", "publishing", "aborting")] == [()] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_transaction_is_in_doubt_until_it_is_committed_or_aborted(kind: type[Files]) -> None:
    files = kind()
    published = stage(files)
    assert isinstance(published, ByRename if kind is Renaming else ByCopy)
    other = replace(NAME, checkpoint=6)
    stage(files, other)
    assert published.in_doubt() == [other, NAME]
    assert published.find_stage_time(NAME) == STAGED_AT
    assert published.find_stage_time(replace(NAME, checkpoint=8)) is None
    assert published.files_in_doubt() == {
        file.staged for name in (NAME, other) for file in manifest_of(name).files
    }
    assert files.content() == {}
    with pytest.raises(SinkError, match="files are staged under job.rows/1/7/0/0 already"):
        published.stage(NAME, msgspec.structs.replace(manifest_of(), files=()))
    assert published.abort(other) == Aborted()
    assert published.commit(NAME) == Committed()
    assert published.commit(NAME) == AlreadyCommitted()
    assert published.abort(NAME) == AlreadyCommitted()
    assert_committed(files, published)
    assert published.forget(NAME)
    assert published.list_proven() == []
    assert files.content() == CONTENT


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_transaction_leaves_nothing_and_cannot_be_committed(kind: type[Files]) -> None:
    files = kind()
    published = stage(files)
    assert published.abort(NAME) == Aborted()
    assert_aborted(files, published)
    assert published.abort(NAME) == Aborted()
    lost = published.commit(NAME)
    assert isinstance(lost, Lost)
    assert "is not staged any more" in lost.reason
    assert published.list_proven() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_that_fails_at_any_step_is_completed_by_the_next_one(kind: type[Files]) -> None:
    for step in range(20):
        files = kind()
        published = stage(files)
        error = fail_at(step, files, published.commit)
        assert isinstance(error, PublicationBegun) or files.content() in ({}, CONTENT)
        assert NAME in published.in_doubt() or published.list_proven() == [NAME]
        again = published.commit(NAME)
        assert again in (Committed(), AlreadyCommitted())
        assert_committed(files, published)
        if error is None:
            return
    raise AssertionError("a commit has no end")


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_after_a_commit_that_failed_completes_it_or_leaves_nothing(
    kind: type[Files],
) -> None:
    outcomes: list[bool] = []
    for step in range(20):
        files = kind()
        published = stage(files)
        fail_at(step, files, published.commit)
        if published.abort(NAME) == Aborted():
            assert_aborted(files, published)
            outcomes.append(False)
        else:
            assert_committed(files, published)
            outcomes.append(True)
    assert outcomes == sorted(outcomes)
    assert not outcomes[0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_that_fails_at_any_step_is_completed_by_the_next_one(kind: type[Files]) -> None:
    for step in range(10):
        files = kind()
        published = stage(files)
        error = fail_at(step, files, published.abort)
        assert published.in_doubt() == [NAME] or files.names("open") == ()
        assert published.abort(NAME) == Aborted()
        assert_aborted(files, published)
        if error is None:
            return
    raise AssertionError("an abort has no end")


def test_names_are_durable_before_the_step_that_counts_on_them() -> None:
    files = Renaming()
    published = stage(files)
    published.commit(NAME)
    first, second = manifest_of().files
    name = name_of(NAME)
    assert files.steps == [
        f"rename {PATHS.staged}/{name} {PATHS.publishing}/{name}",
        f"durable {PATHS.publishing}",
        f"rename {first.staged} {first.path}",
        f"rename {second.staged} {second.path}",
        "durable day=1",
        "durable day=2",
        f"rename {PATHS.publishing}/{name} {PATHS.committed}/{name}",
        f"durable {PATHS.committed}",
    ]
    # Another process that moved the manifest may have died before its name was durable.
    files = Renaming()
    published = stage(files)
    files.before = lambda _: files.rename(f"{PATHS.staged}/{name}", f"{PATHS.publishing}/{name}")
    assert published.commit(NAME) == Committed()
    assert f"durable {PATHS.publishing}" in files.steps


@pytest.mark.parametrize("kind", KINDS)
def test_a_transaction_without_one_of_its_files_is_lost_and_shows_none(kind: type[Files]) -> None:
    for data in (None, b"firs"):
        files = kind()
        published = stage(files)
        first = manifest_of().files[0]
        MemoryFiles.delete(files, first.staged)
        if data is not None:
            MemoryFiles.write(files, first.staged, [data])
        lost = published.commit(NAME)
        assert isinstance(lost, Lost)
        assert "of 1 rows is gone or no longer 5 bytes long" in lost.reason
        assert files.content() == {}
        assert published.list_proven() == []


@pytest.mark.parametrize("kind", KINDS)
def test_two_committers_at_once_publish_a_transaction_once(kind: type[Files]) -> None:
    """The other one commits all at any step of the first one."""
    for step in range(10):
        files = kind()
        published = stage(files)
        ended: list[object] = []

        def commit_elsewhere(_: str, at: int = step) -> None:
            if len(files.steps) == at and not ended:
                ended.append(None)
                ended.append(publication(files, PATHS).commit(NAME))

        files.before = commit_elsewhere
        outcome = published.commit(NAME)
        assert outcome in (Committed(), AlreadyCommitted())
        assert_committed(files, published)
        if not ended:
            return
        assert ended[1] in (Committed(), AlreadyCommitted())
    raise AssertionError("a commit has no end")


# --- object stores -------------------------------------------------------------------------------


def test_a_copy_that_is_not_complete_is_no_proof() -> None:
    files = Copying()
    published = stage(files)
    files.is_whole = False
    with pytest.raises(PublicationBegun, match="is not complete: 4 of 5 bytes"):
        published.commit(NAME)
    assert published.list_proven() == []
    files.is_whole = True
    assert published.commit(NAME) == Committed()
    assert_committed(files, published)


def test_objects_that_are_left_behind_keep_their_proof_until_they_are_deleted() -> None:
    files = Copying()
    published = stage(files)
    files.before = lambda text: _refuse(text, "delete")
    assert published.commit(NAME) == Committed()
    assert len(files.names("open")) == 2
    assert published.in_doubt() == []
    assert not published.forget(NAME)
    assert published.list_proven() == [NAME]
    files.before = None
    assert published.forget(NAME)
    assert published.list_proven() == []
    assert files.names("open") == files.names("staged") == ()


def _refuse(text: str, begin: str) -> None:
    if text.startswith(begin):
        raise StorageError(text)


# --- manifests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"staged": "elsewhere/1-0-aa-0"},
        {"path": f"{PATHS.committed}/x"},
        {"path": f"{PATHS.committed}/{PATHS.part(NAME, 0, TOKEN, 'parquet')}"},
        {"path": f"day=1/{PATHS.part(replace(NAME, checkpoint=8), 0, TOKEN, 'parquet')}"},
        {"path": f"../{PATHS.part(NAME, 0, TOKEN, 'parquet')}"},
    ],
)
def test_a_manifest_with_names_that_no_writer_gives_publishes_and_deletes_nothing(
    kind: type[Files], changes: dict[str, str]
) -> None:
    files = kind()
    published = stage(files)
    first = msgspec.structs.replace(manifest_of().files[0], **changes)
    damaged = msgspec.structs.replace(manifest_of(), files=(first,))
    for data, told in (
        (damaged.encode(), "no writer of job.rows/1/7/0/0 has written it"),
        (b"{", "is damaged: "),
        (manifest_of(replace(NAME, checkpoint=8)).encode(), "it is of transaction"),
    ):
        MemoryFiles.write(files, f"{PATHS.staged}/{name_of(NAME)}", [data])
        for end in (published.commit, published.abort):
            with pytest.raises(SinkError, match=told):
                end(NAME)
        if kind is Renaming:
            # The manifest is where the abort has moved it.
            MemoryFiles.delete(files, f"{PATHS.aborting}/{name_of(NAME)}")
    assert len(files.names("open")) == 2
    assert files.content() == {}


def test_a_storage_error_says_whether_it_may_pass() -> None:
    with pytest.raises(SettingsRefused, match="no right"), sink_errors():
        raise filesystem.StorageRefused("no right")
    with pytest.raises(SinkError, match="no answer") as caught, sink_errors():
        raise StorageError("no answer")
    assert type(caught.value) is SinkError


# --- the files of whole transactions -------------------------------------------------------------


def test_only_files_of_whole_transactions_and_checkpoints_are_listed(tmp_path: Path) -> None:
    def add(path: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"")

    def part(checkpoint: int, subtask: int = 0) -> str:
        return PATHS.part(replace(NAME, checkpoint=checkpoint, subtask=subtask), 0, TOKEN, "csv")

    for checkpoint in (2, 4, 5, 6, 7):
        add(f"day=1/{part(checkpoint)}")
    add(part(6, 1))
    add(part(6, 2))
    for checkpoint, subtask in ((5, 0), (6, 0), (6, 1)):
        committed = replace(NAME, checkpoint=checkpoint, subtask=subtask)
        add(f"{PATHS.committed}/{name_of(committed)}")
    add("day=1/of-another.csv")
    add(f"day=1/{SinkPaths('other').part(NAME, 0, TOKEN, 'csv')}")
    # The highest mark counts. Checkpoints before it are whole in all subtasks.
    for mark in (3, 5):
        add(PATHS.name_pruned_mark(CheckpointId(mark)))
    add(f"{PATHS.pruned}/no-mark")
    listed = list_committed_files(str(tmp_path), "job.rows")
    whole = [f"day=1/{part(2)}", f"day=1/{part(4)}"]
    proven = [f"day=1/{part(5)}", f"day=1/{part(6)}", part(6, 1)]
    assert listed.paths() == whole + proven
    assert listed.whole_before == 5
    assert listed.paths_of_whole_checkpoints() == whole
    assert list_committed_files(str(tmp_path), "none").paths() == []
