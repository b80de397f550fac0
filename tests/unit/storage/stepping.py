"""Interleaves threads at every file system call, chosen by a seed, so that a race can be replayed.

Only one thread runs at any time. Before each call of the file system a thread waits until the
scheduler picks it; the scheduler picks when every live thread waits.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from typing_extensions import override

from onceflow.core.storage.filesystems import filesystem

DEADLINE_S = 60.0


class Scheduler:
    """Decides whose turn it is."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._condition = threading.Condition()
        self._live = 0
        self._waiting: list[str] = []
        self._turn: str | None = None

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Run all of `works` to their ends, each in a thread, one at a time."""
        errors: list[BaseException] = []

        def body(work: Callable[[], None]) -> None:
            try:
                self.step()
                work()
            except BaseException as error:
                errors.append(error)
            finally:
                with self._condition:
                    self._live -= 1
                    self._pick()

        self._live = len(works)
        threads = [
            threading.Thread(target=body, args=(work,), name=str(number))
            for number, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a thread never came to its end"
        if errors:
            raise errors[0]

    def step(self) -> None:
        """Wait for this thread's turn."""
        me = threading.current_thread().name
        with self._condition:
            self._waiting.append(me)
            self._pick()
            assert self._condition.wait_for(lambda: self._turn == me, DEADLINE_S)
            self._turn = None

    def _pick(self) -> None:
        if self._waiting and len(self._waiting) == self._live:
            # In the order of names, not of arrival: what a seed means must not depend on luck.
            self._waiting.sort()
            index = self.random.randrange(len(self._waiting))
            self._turn = self._waiting.pop(index)
            self._condition.notify_all()


class SteppingFileSystem(filesystem.CreatesAtomically):
    """Files in memory; atomic calls, except that a listing is taken in two looks, as `readdir` may.

    With `lost_replies`, a create may work or not, and raise `CreationUnknown` all the same.
    """

    def __init__(self, scheduler: Scheduler, *, lost_replies: float = 0.0) -> None:
        self.files: dict[str, bytes] = {}
        self._scheduler = scheduler
        self._lost_replies = lost_replies

    @override
    def location(self, path: str) -> str:
        return f"memory/{path}"

    @override
    def create_if_absent(self, path: str, data: bytes) -> filesystem.CreateOutcome:
        self._scheduler.step()
        lost = self._scheduler.random.random() < self._lost_replies
        if lost and self._scheduler.random.random() < 0.5:
            raise filesystem.CreationUnknown(f"{path}: no reply, and nothing done")
        existing = self.files.setdefault(path, data)
        if lost:
            raise filesystem.CreationUnknown(f"{path}: no reply, and done")
        return filesystem.Created() if existing is data else filesystem.AlreadyExists(existing)

    @override
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        self._scheduler.step()
        self.files[path] = b"".join(chunks)
        return len(self.files[path])

    @override
    def read(self, path: str) -> bytes | None:
        self._scheduler.step()
        return self.files.get(path)

    @override
    def read_chunks(self, path: str) -> Iterator[bytes] | None:
        data = self.read(path)
        return None if data is None else iter((data,))

    @override
    def size(self, path: str) -> int | None:
        data = self.read(path)
        return None if data is None else len(data)

    @override
    def list(self, directory: str) -> tuple[str, ...]:
        self._scheduler.step()
        early = [name for name in self._names(directory) if _is_looked_at_first(name)]
        self._scheduler.step()
        late = [name for name in self._names(directory) if not _is_looked_at_first(name)]
        return tuple(sorted(early + late))

    @override
    def delete(self, path: str) -> None:
        self._scheduler.step()
        self.files.pop(path, None)

    @override
    def delete_tree(self, path: str) -> None:
        raise NotImplementedError("the log deletes no trees")

    def _names(self, directory: str) -> set[str]:
        prefix = directory + "/"
        return {path[len(prefix) :] for path in self.files if path.startswith(prefix)}


def _is_looked_at_first(name: str) -> bool:
    """Any fixed rule: a directory's order has nothing to do with its names'."""
    return sum(name.encode()) % 2 == 0
