"""Signals to whole process trees, and the watchdog that ends a tree when its owner is gone.

A server is rarely one process: Postgres' backends each lead their own process group, so a signal to
the postmaster's group leaves them writing. What is sent here goes to every descendant, the parent
stopped first, so that it starts no further child in between.

Run as a program (`python processes.py PID [DIRECTORY]`) this file is the watchdog: it imports the
standard library alone, because it is started by path, beside and not inside the package.
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
    """Return `pid` and all its living descendants, parents before children; empty when gone."""
    table = _process_table()
    if pid not in table or not table[pid].alive:
        return ()
    children: dict[int, list[int]] = {}
    for child, entry in table.items():
        if entry.alive:
            children.setdefault(entry.parent, []).append(child)
    return tuple(_walk(pid, children))


def is_alive(pid: int) -> bool:
    """Return whether `pid` runs; a zombie does not."""
    entry = _process_table().get(pid)
    return entry is not None and entry.alive


def is_paused(pid: int) -> bool:
    """Return whether `pid` is stopped by a signal."""
    entry = _process_table().get(pid)
    return entry is not None and entry.state.startswith("T")


def children_of(pid: int) -> tuple[int, ...]:
    """Return the living direct children of `pid`."""
    table = _process_table()
    return tuple(child for child, entry in table.items() if entry.alive and entry.parent == pid)


def parent_of(pid: int) -> int | None:
    """Return the parent of `pid`, None when `pid` is gone."""
    entry = _process_table().get(pid)
    return entry.parent if entry is not None and entry.alive else None


def session_members(session: int) -> tuple[int, ...]:
    """Return every living process of the session that process `session` once began.

    Finds what a dead parent has left behind: children keep its session, but not its tree.
    """
    members: list[int] = []
    for pid, entry in _process_table().items():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if entry.alive and os.getsid(pid) == session:
                members.append(pid)
    return tuple(members)


def kill_session(session: int, *, timeout_s: float = 10.0) -> tuple[int, ...]:
    """SIGKILL every process of `session` until none is left; return those that were.

    Raises:
        TimeoutError: Some still run, or keep coming, after `timeout_s`.
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
    """Send one signal to one process; False when it was gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def kill_process(pid: int, *, timeout_s: float = 10.0) -> bool:
    """SIGKILL one process and return once it no longer runs; False when it was gone already.

    Its children live on, as after a real crash. Idempotent.

    Raises:
        TimeoutError: The kernel still runs it after `timeout_s` (uninterruptible I/O).
    """
    sent = signal_process(pid, signal.SIGKILL)
    _await_gone((pid,), timeout_s)
    return sent


def kill_tree(pid: int, *, timeout_s: float = 10.0) -> tuple[int, ...]:
    """SIGKILL `pid` and every descendant; return the pids once none of them runs any more.

    Raises:
        TimeoutError: The kernel still runs one of them after `timeout_s`.
    """
    tree = _stop_tree(pid)
    for member in tree:
        signal_process(member, signal.SIGKILL)
    _await_gone(tree, timeout_s)
    return tree


def pause_tree(pid: int, *, timeout_s: float = 10.0) -> tuple[int, ...]:
    """SIGSTOP `pid` and every descendant; return their pids once not a thread of them runs.

    A signal is sent to a process, and acts on each of its threads when that is next scheduled: on
    a busy machine a server would answer some requests yet.

    Raises:
        TimeoutError: One still runs after `timeout_s` (uninterruptible I/O).
    """
    tree = _stop_tree(pid)
    deadline = time.monotonic() + timeout_s
    while running := [member for member in tree if not _is_still(member)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {running} still run {timeout_s} s after SIGSTOP")
        time.sleep(_POLL_S)
    return tree


def _stop_tree(pid: int) -> tuple[int, ...]:
    """SIGSTOP `pid` and every descendant, repeated until no new one has appeared."""
    paused: dict[int, None] = {}
    while True:
        fresh = [member for member in process_tree(pid) if member not in paused]
        if not fresh:
            return tuple(paused)
        for member in fresh:
            signal_process(member, signal.SIGSTOP)
            paused[member] = None


def _is_still(pid: int) -> bool:
    """Return whether each thread of `pid` is stopped, or gone."""
    tasks = _PROC / str(pid) / "task"
    if not tasks.exists():
        return is_paused(pid) or not is_alive(pid)
    try:
        states = [_state_and_parent(task / "stat")[0] for task in tasks.iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        # A thread or the process ended meanwhile: the next look knows.
        return not is_alive(pid)
    return all(state in ("T", "t", "Z", "X") for state in states)


def unpause_tree(pid: int) -> tuple[int, ...]:
    """SIGCONT every descendant of `pid`, and `pid` itself last."""
    tree = process_tree(pid)
    for member in reversed(tree):
        signal_process(member, signal.SIGCONT)
    return tree


class Watchdog:
    """Kills a process tree, and deletes a directory, if this process dies without `release()`.

    A test run or a demo that is itself SIGKILLed leaves no server behind.
    """

    def __init__(self, pid: int, directory: Path | None = None) -> None:
        """Start watching `pid`; `directory` is deleted with it."""
        arguments = [str(pid)] if directory is None else [str(pid), str(directory)]
        # -I -S: neither the environment nor site-packages, so that it starts in milliseconds.
        # Its own session: a Ctrl-C in the terminal must reach the owner only.
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
    # The command name stands in parentheses and may hold anything, parentheses too.
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
