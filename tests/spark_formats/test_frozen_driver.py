"""A driver that was frozen wakes beside its successor: exactly one of the two goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pyarrow.dataset as ds
import pytest

pytestmark = [pytest.mark.spark, pytest.mark.servers, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("endless_query.py")
DEADLINE_S = 400.0


class Program:
    """The query in a driver of its own: Python, its JVM and its workers, in one process group."""

    def __init__(self, directory: Path, name: str, stack: ExitStack) -> None:
        self._batches = directory / f"{name}.batches"
        self.error = directory / f"{name}.error"
        self._log = directory / f"{name}.log"
        log = stack.enter_context(self._log.open("wb"))
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(directory), name],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(self._end)

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    @property
    def batches(self) -> int:
        """How many batches it has seen done."""
        return len(self._batches.read_text().splitlines()) if self._batches.exists() else 0

    def await_batches(self, count: int) -> None:
        await_true(lambda: self.batches >= count or self.error.exists(), str(self._log))
        assert not self.error.exists(), self.error.read_text()

    def _end(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()


def await_true(condition: Callable[[], bool], log: str, pause_s: float = 0.05) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, Path(log).read_text()[-2000:]
        time.sleep(pause_s)


def newest(directory: Path) -> int:
    numbers = [int(one.name) for one in directory.iterdir() if one.name.isdecimal()]
    return max(numbers, default=-1)


def test_of_a_frozen_driver_and_its_successor_the_successor_goes_on(tmp_path: Path) -> None:
    with ExitStack() as stack:
        old = Program(tmp_path, "old", stack)
        old.await_batches(2)
        # As soon as Spark has written where a batch ends: the batch is not claimed yet, as a rule.
        offsets = tmp_path / "query" / "offsets"
        before = newest(offsets)
        await_true(lambda: newest(offsets) > before, str(tmp_path / "old.log"), pause_s=0.0)
        old.signal(signal.SIGSTOP)
        new = Program(tmp_path, "new", stack)
        new.await_batches(2)
        old.signal(signal.SIGCONT)
        await_true(old.error.exists, str(tmp_path / "old.log"))
        new.await_batches(new.batches + 5)
        new.signal(signal.SIGKILL)
    rows = ds.dataset(tmp_path / "rows", format="parquet").to_table()
    ids = rows.column("id").to_pylist()
    assert Counter(ids) == Counter(range(len(ids)))
