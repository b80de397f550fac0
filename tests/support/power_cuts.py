"""A record of what a program does to a directory, and the directories that a power cut may leave.

POSIX promises little about a power cut. The bytes of a file are on the disk once fsync() or
fdatasync() of the file has returned. A name is on the disk once fsync() of its directory has
returned. Anything later may be lost, or may be on the disk all the same, in any order. A rename is
on the disk as a whole or not at all, as in each file system with a journal.

`record` replaces the functions of `os` that change names or sync. `Record.crashes` builds, for each
moment between two calls, the directories that a disk may have. `Record.check_complete` compares
the record with the real directory, so a change by another function fails the test.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

NAMES_AT_ONCE_MAX = 4
"""The number of unsynced names of which every subset is tried; of more, each alone."""


@dataclass(eq=False)
class File:
    """A file, whatever its names are."""

    synced: bytes = b""
    """The bytes that are on the disk."""


@dataclass(eq=False)
class Directory:
    """A directory, with the names that a program sees, and those that are on the disk."""

    names: dict[str, Node] = field(default_factory=dict[str, "Node"])
    durable: dict[str, Node] = field(default_factory=dict[str, "Node"])


Node: TypeAlias = File | Directory


@dataclass(frozen=True)
class Change:
    """One change of names. A node of None removes the name."""

    names: tuple[tuple[Directory, str, Node | None], ...]

    def without(self, directory: Directory, name: str) -> Change:
        """Return the change of the other names."""
        return Change(
            tuple(part for part in self.names if part[0] is not directory or part[1] != name)
        )


@dataclass(frozen=True)
class Crash:
    """A directory that a power cut may leave."""

    moment: int
    """The number of recorded calls before the cut."""
    after: str
    """The last of these calls, for messages."""
    lost: str
    """The unsynced changes that are not on the disk, for messages."""
    kept: frozenset[str]
    """The promises that the program had made before."""


class Record:
    """The calls of a program that change the directory `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = Directory()
        self._pending: list[Change] = []
        self._calls: list[str] = []
        self._promises: set[str] = set()
        self._outside: dict[str, File] = {}
        self._states: list[tuple[Crash, dict[str, bytes | None]]] = []

    def promise(self, text: str) -> None:
        """Note that from now on `text` must be true after a power cut."""
        self._promises.add(text)
        self._look(f"promise: {text}")

    def withdraw(self, text: str) -> None:
        """Note that the program may break the promise `text` from now on."""
        self._promises.discard(text)

    def crashes(self, scratch: Path) -> Iterator[tuple[Crash, Path]]:
        """Yield each directory that a power cut may leave, each once, with its moment."""
        seen: set[object] = set()
        for crash, tree in self._states:
            key = (tuple(sorted(tree.items())), crash.kept)
            if key in seen:
                continue
            seen.add(key)
            target = scratch / "disk"
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            for name, content in sorted(tree.items()):
                if content is None:
                    (target / name).mkdir()
                else:
                    (target / name).write_bytes(content)
            yield crash, target

    def check_complete(self) -> None:
        """Raise AssertionError unless the recorded names are those of the real directory."""
        found = {str(path.relative_to(self.root)) for path in self.root.rglob("*")}
        assert set(_flatten(self.top, lambda node: node.names, ())) == found

    # --- calls ------------------------------------------------------------------------------------

    def inside(self, path: str) -> bool:
        """Return True if `path` is in the recorded directory."""
        return Path(path).is_relative_to(self.root) and Path(path) != self.root

    def change(self, call: str, *names: tuple[str, Node | None]) -> None:
        """Note that the paths now name these nodes."""
        located = tuple((*self._parent(path), node) for path, node in names)
        self._look(f"before {call}")
        for directory, name, node in located:
            _set_name(directory.names, name, node)
        self._pending.append(Change(located))
        self._look(call)

    def sync(self, call: str, path: str) -> None:
        """Note that the bytes of a file, or the names of a directory, are on the disk."""
        node = self.top if Path(path) == self.root else self.find(path)
        if isinstance(node, File):
            node.synced = Path(path).read_bytes()
        else:
            self._sync_names(node)
        self._look(call)

    def _sync_names(self, synced: Directory) -> None:
        """Move the changes of a directory to the disk, with the other half of each rename."""
        left: list[Change] = []
        for change in self._pending:
            if all(directory is not synced for directory, _, _ in change.names):
                left.append(change)
                continue
            for directory, name, node in change.names:
                _set_name(directory.durable, name, node)
                # Earlier changes of this name have no effect any more.
                left = [earlier.without(directory, name) for earlier in left]
        self._pending = [change for change in left if change.names]
        assert synced.durable == synced.names

    def find(self, path: str) -> Node:
        """Return the node that `path` names now, also if another function has created it."""
        directory, name = self._parent(path)
        if name not in directory.names:
            assert Path(path).exists(), path
            self.change(f"create {path}", (path, Directory() if Path(path).is_dir() else File()))
        return directory.names[name]

    def adopt(self, path: str) -> File:
        """Return a file that is outside of the directory. Its unsynced bytes may be lost."""
        return self._outside.get(path) or File()

    def sync_outside(self, path: str) -> None:
        """Note that the bytes of a file outside of the directory are on the disk."""
        if Path(path).is_file():
            self._outside[path] = File(Path(path).read_bytes())

    def _parent(self, path: str) -> tuple[Directory, str]:
        *parents, name = Path(path).relative_to(self.root).parts
        directory = self.top
        for parent in parents:
            node = directory.names[parent]
            assert isinstance(node, Directory), path
            directory = node
        return directory, name

    def _look(self, call: str) -> None:
        """Keep the directories that a power cut at this moment may leave."""
        self._calls.append(call)
        for chosen in _choose(self._pending):
            durable: dict[int, dict[str, Node]] = {}
            for change in chosen:
                for directory, name, node in change.names:
                    entries = durable.setdefault(id(directory), dict(directory.durable))
                    _set_name(entries, name, node)

            def read(
                directory: Directory, now: dict[int, dict[str, Node]] = durable
            ) -> dict[str, Node]:
                return now.get(id(directory), directory.durable)

            lost = ", ".join(
                name
                for change in self._pending
                if change not in chosen
                for _, name, _ in change.names
            )
            crash = Crash(len(self._calls), call, lost, frozenset(self._promises))
            self._states.append((crash, _flatten(self.top, read, ())))


def _set_name(names: dict[str, Node], name: str, node: Node | None) -> None:
    names.pop(name, None)
    if node is not None:
        names[name] = node


def _choose(pending: list[Change]) -> Iterator[list[Change]]:
    """Yield the sets of unsynced changes that a disk may have, in their order."""
    count = len(pending)
    if count <= NAMES_AT_ONCE_MAX:
        for bits in range(1 << count):
            yield [change for number, change in enumerate(pending) if bits >> number & 1]
        return
    for number in range(count + 1):
        yield pending[:number]
        yield pending[number:]
    yield from ([change] for change in pending)


def _flatten(
    directory: Directory, read: Callable[[Directory], dict[str, Node]], above: tuple[str, ...]
) -> dict[str, bytes | None]:
    """Return the bytes of all files below `directory` by path. A directory has None."""
    tree: dict[str, bytes | None] = {}
    for name, node in read(directory).items():
        path = (*above, name)
        if isinstance(node, File):
            tree["/".join(path)] = node.synced
        else:
            tree["/".join(path)] = None
            tree |= _flatten(node, read, path)
    return tree


class CutFailed(Exception):
    """A power cut breaks a promise."""


def cut_at_each_moment(
    directory: Path, run: Callable[[Record], None], check: Callable[[Path, frozenset[str]], None]
) -> int:
    """Run a program, check each directory that a power cut may leave, and return their number.

    Raises:
        CutFailed: `check` failed. The message has the moment.
    """
    root, after = directory / "root", directory / "after"
    for new in (root, after):
        new.mkdir()
    with record(root) as disk:
        run(disk)
    disk.check_complete()
    count = 0
    # The checks need no durable files.
    with patch.object(os, "fsync"), patch.object(os, "fdatasync"):
        for crash, left in disk.crashes(after):
            count += 1
            try:
                check(left, crash.kept)
            except Exception as error:
                raise CutFailed(f"after {crash.after}, without {crash.lost}") from error
    return count


def do_nothing(*_: object) -> None:
    """Stand in for a sync that is left out."""


@contextmanager
def record(root: Path) -> Generator[Record]:
    """Record all changes of the empty directory `root`, whose own name is on the disk.

    Replaces functions of `os` in this process. Not for programs with several threads that change
    names.
    """
    noted = Record(root)
    real = {name: getattr(os, name) for name in _WRAPPERS}
    for name, wrap in _WRAPPERS.items():
        setattr(os, name, wrap(noted, real[name]))
    try:
        yield noted
    finally:
        for name, function in real.items():
            setattr(os, name, function)


_Function: TypeAlias = Callable[..., Any]


def _path_of(path: Any, dir_fd: int | None = None) -> str:
    if isinstance(path, int):
        return str(Path(f"/proc/self/fd/{path}").readlink())
    text = os.fsdecode(path)
    return text if dir_fd is None else f"{_path_of(dir_fd)}/{text}"


def _wrap_open(noted: Record, real: _Function) -> _Function:
    def open_file(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        full = _path_of(path, named.get("dir_fd"))
        is_new = bool(flags & os.O_CREAT) and noted.inside(full) and not Path(full).exists()
        descriptor: int = real(path, flags, *rest, **named)
        if is_new:
            noted.change(f"create {full}", (full, File()))
        return descriptor

    return open_file


def _wrap_sync(noted: Record, real: _Function) -> _Function:
    def sync(descriptor: int) -> None:
        real(descriptor)
        path = _path_of(descriptor)
        if noted.inside(path) or Path(path) == noted.root:
            noted.sync(f"sync {path}", path)
        else:
            noted.sync_outside(path)

    return sync


def _wrap_link(noted: Record, real: _Function) -> _Function:
    def link(source: Any, target: Any, **named: Any) -> None:
        real(source, target, **named)
        if not noted.inside(_path_of(target)):
            return
        path = _path_of(source)
        node = noted.find(path) if noted.inside(path) else noted.adopt(path)
        noted.change(f"link {_path_of(target)}", (_path_of(target), node))

    return link


def _wrap_rename(noted: Record, real: _Function) -> _Function:
    def rename(source: Any, target: Any, **named: Any) -> None:
        is_inside = noted.inside(_path_of(source))
        node = noted.find(_path_of(source)) if is_inside else None
        real(source, target, **named)
        if node is not None:
            changes = ((_path_of(source), None), (_path_of(target), node))
            noted.change(f"rename {_path_of(source)} to {_path_of(target)}", *changes)

    return rename


def _wrap_removal(noted: Record, real: _Function) -> _Function:
    def remove(path: Any, **named: Any) -> None:
        full = _path_of(path, named.get("dir_fd"))
        real(path, **named)
        if noted.inside(full):
            noted.change(f"remove {full}", (full, None))

    return remove


def _wrap_mkdir(noted: Record, real: _Function) -> _Function:
    def make_directory(path: Any, *rest: Any, **named: Any) -> None:
        full = _path_of(path, named.get("dir_fd"))
        real(path, *rest, **named)
        if noted.inside(full):
            noted.change(f"mkdir {full}", (full, Directory()))

    return make_directory


_WRAPPERS: dict[str, Callable[[Record, _Function], _Function]] = {
    "open": _wrap_open,
    "fsync": _wrap_sync,
    "fdatasync": _wrap_sync,
    "link": _wrap_link,
    "rename": _wrap_rename,
    "replace": _wrap_rename,
    "unlink": _wrap_removal,
    "remove": _wrap_removal,
    "rmdir": _wrap_removal,
    "mkdir": _wrap_mkdir,
}
