"""Signals to whole process trees, and a watchdog that kills a tree when its owner dies.

A server usually has several processes. Each backend of Postgres leads its own process group, so a
signal to the postmaster's group does not stop the backends. The functions here signal every
descendant. They stop the parent first, so that it starts no further child in between.

If this file runs as a program (`python processes.py PID [DIRECTORY]`), it is the watchdog. It only
imports the standard library, because it is started by path, outside the package.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.005
_PROC = Path("/proc")
_RELEASED = b"released"


@dataclass(frozen=True, slots=True)
class _Entry:
    parent: int
    state: str

    @property
    def alive(self) -> bool:
        return not self.state.startswith(("Z", "X"))


def process_tree(pid: int) -> tuple[int, ...]:
    """Return `pid` and its living descendants, parents before children; empty if `pid` is dead."""
    table = _process_table()
    if pid not in table or not table[pid].alive:
        return ()
    children: dict[int, list[int]] = {}
    for child, entry in table.items():
        if entry.alive:
            children.setdefault(entry.parent, []).append(child)
    return tuple(_walk(pid, children))


def is_alive(pid: int) -> bool:
    """Return True if `pid` runs. A zombie does not run."""
    entry = _process_table().get(pid)
    return entry is not None and entry.alive


def is_paused(pid: int) -> bool:
    """Return True if `pid` is stopped by a signal."""
    entry = _process_table().get(pid)
    return entry is not None and entry.state.startswith("T")


def children_of(pid: int) -> tuple[int, ...]:
    """Return the living direct children of `pid`."""
    table = _process_table()
    return tuple(child for child, entry in table.items() if entry.alive and entry.parent == pid)


def parent_of(pid: int) -> int | None:
    """Return the parent of `pid`, or None if `pid` is dead."""
    entry = _process_table().get(pid)
    return entry.parent if entry is not None and entry.alive else None


def session_members(session: int) -> tuple[int, ...]:
    """Return the living processes of the session that process `session` started.

    Finds also the children of a dead parent: they keep its session, but not its process tree.
    """
    members: list[int] = []
    for pid, entry in _process_table().items():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if entry.alive and os.getsid(pid) == session:
                members.append(pid)
    return tuple(members)


def kill_session(session: int, *, timeout_s: float = 10.0) -> tuple[int, ...]:
    """SIGKILL the processes of `session` until none is left. Return the killed pids.

    Raises:
        TimeoutError: Processes still run, or new ones start, after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    killed: dict[int, None] = {}
    while members := session_members(session):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {members} of session {session} outlive SIGKILL")
        for member in members:
            signal_process(member, signal.SIGKILL)
            killed[member] = None
        time.sleep(_POLL_S)
    return tuple(killed)


def signal_process(pid: int, number: signal.Signals) -> bool:
    """Send a signal to a process. Return False if the process was already dead."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def kill_process(pid: int, *, timeout_s: float = 10.0) -> bool:
    """SIGKILL a process and wait until it is dead. Return False if it was already dead.

    Its children continue to run, as after a real crash. Idempotent.

    Raises:
        TimeoutError: The kernel still runs it after `timeout_s` (uninterruptible I/O).
    """
    sent = signal_process(pid, signal.SIGKILL)
    _await_gone((pid,), timeout_s)
    return sent


def kill_tree(pid: int, *, timeout_s: float = 10.0) -> tuple[int, ...]:
    """SIGKILL `pid` and its descendants. Return their pids when none of them runs.

    Raises:
        TimeoutError: A process still runs after `timeout_s`.
    """
    tree = _stop_tree(pid)
    for member in tree:
        signal_process(member, signal.SIGKILL)
    _await_gone(tree, timeout_s)
    return tree


def pause_tree(pid: int, *, timeout_s: float = 10.0) -> tuple[int, ...]:
    """SIGSTOP `pid` and its descendants. Return their pids when all their threads have stopped.

    A signal stops each thread of a process only when that thread is next scheduled. So without the
    wait, a server on a busy machine could still answer some requests.

    Raises:
        TimeoutError: A process still runs after `timeout_s` (uninterruptible I/O).
    """
    tree = _stop_tree(pid)
    deadline = time.monotonic() + timeout_s
    while running := [member for member in tree if not _is_still(member)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {running} still run {timeout_s} s after SIGSTOP")
        time.sleep(_POLL_S)
    return tree


def _stop_tree(pid: int) -> tuple[int, ...]:
    """SIGSTOP `pid` and its descendants. Repeat until there are no new descendants."""
    paused: dict[int, None] = {}
    while True:
        fresh = [member for member in process_tree(pid) if member not in paused]
        if not fresh:
            return tuple(paused)
        for member in fresh:
            signal_process(member, signal.SIGSTOP)
            paused[member] = None


def _is_still(pid: int) -> bool:
    """Return True if each thread of `pid` is stopped or dead."""
    tasks = _PROC / str(pid) / "task"
    if not tasks.exists():
        return is_paused(pid) or not is_alive(pid)
    try:
        states = [_state_and_parent(task / "stat")[0] for task in tasks.iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        # A thread or the process ended in the meantime. The next call finds out.
        return not is_alive(pid)
    return all(state in ("T", "t", "Z", "X") for state in states)


def unpause_tree(pid: int) -> tuple[int, ...]:
    """SIGCONT the descendants of `pid`, and then `pid` itself."""
    tree = process_tree(pid)
    for member in reversed(tree):
        signal_process(member, signal.SIGCONT)
    return tree


class Watchdog:
    """A watchdog that kills a process tree and deletes a directory if this process dies.

    `release()` ends the watch. So a test run or a demo that is killed leaves no server behind.
    """

    def __init__(self, pid: int, directory: Path | None = None) -> None:
        """Start to watch. If this process dies, `pid` is killed and `directory` deleted."""
        arguments = [str(pid)] if directory is None else [str(pid), str(directory)]
        # -I -S ignore the environment and site-packages, so that it starts in milliseconds. It has
        # its own session, so that a Ctrl-C in the terminal reaches only the owner.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self, *, timeout_s: float = 10.0) -> None:
        """End the watch without killing anything. Idempotent."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.communicate(_RELEASED, timeout=timeout_s)


def _walk(pid: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    yield pid
    for child in sorted(children.get(pid, ())):
        yield from _walk(child, children)


def _process_table() -> dict[int, _Entry]:
    if _PROC.joinpath("self/stat").exists():
        return _table_of_proc()
    listing = subprocess.run(
        ["ps", "-axo", "pid=,ppid=,state="], check=True, capture_output=True, text=True
    )
    rows = (line.split() for line in listing.stdout.splitlines())
    return {int(pid): _Entry(int(parent), state) for pid, parent, state in rows}


def _table_of_proc() -> dict[int, _Entry]:
    table: dict[int, _Entry] = {}
    for name in os.listdir(_PROC):  # noqa: PTH208 - a Path a process would be the larger part
        if not name.isdigit():
            continue
        try:
            state, parent = _state_and_parent(_PROC / name / "stat")
        except (FileNotFoundError, ProcessLookupError):
            continue
        table[int(name)] = _Entry(int(parent), state)
    return table


def _state_and_parent(stat: Path) -> tuple[str, str]:
    text = stat.read_text(errors="replace")
    # The command name is in parentheses, and may itself contain parentheses.
    state, parent = text[text.rindex(")") + 2 :].split(maxsplit=2)[:2]
    return state, parent


def _await_gone(pids: tuple[int, ...], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while remaining := [pid for pid in pids if is_alive(pid)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {remaining} still run {timeout_s} s after SIGKILL")
        time.sleep(_POLL_S)


def _watch(arguments: list[str]) -> None:
    if sys.stdin.buffer.read() == _RELEASED:
        return
    kill_tree(int(arguments[0]))
    for directory in arguments[1:]:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _watch(sys.argv[1:])
