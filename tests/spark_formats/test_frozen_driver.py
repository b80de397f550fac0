"""A driver that was frozen wakes beside its successor: exactly one of the two goes on."""

from __future__ import annotations

import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from tests.support.program import Program, python
from typing_extensions import override

pytestmark = [pytest.mark.spark, pytest.mark.servers, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("endless_query.py")
DEADLINE_S = 400.0


class Query(Program):
    """The query in a driver of its own: Python, its JVM and its workers, in one process group."""

    def __init__(self, directory: Path, name: str) -> None:
        self._batches = directory / f"{name}.batches"
        self.error = directory / f"{name}.error"
        super().__init__(directory / f"{name}.log", *python(PROGRAM, directory, name))

    @override
    def __exit__(self, *failure: object) -> None:
        self.end()

    @property
    def batches(self) -> int:
        """Return the number of batches that the driver has seen completed."""
        return len(self._batches.read_text().splitlines()) if self._batches.exists() else 0

    def await_batches(self, count: int) -> None:
        self.wait_until(lambda: self.batches >= count or self.error.exists(), DEADLINE_S)
        assert not self.error.exists(), self.error.read_text()


def newest(directory: Path) -> int:
    numbers = [int(one.name) for one in directory.iterdir() if one.name.isdecimal()]
    return max(numbers, default=-1)


def test_of_a_frozen_driver_and_its_successor_the_successor_goes_on(tmp_path: Path) -> None:
    with ExitStack() as stack:
        old = stack.enter_context(Query(tmp_path, "old"))
        old.await_batches(2)
        # As soon as Spark has written where a batch ends: the batch is not claimed yet, as a rule.
        offsets = tmp_path / "query" / "offsets"
        before = newest(offsets)
        old.wait_until(lambda: newest(offsets) > before, DEADLINE_S, pause_s=0.0)
        old.signal_group(signal.SIGSTOP)
        new = stack.enter_context(Query(tmp_path, "new"))
        new.await_batches(2)
        old.signal_group(signal.SIGCONT)
        old.wait_until(old.error.exists, DEADLINE_S)
        new.await_batches(new.batches + 5)
        new.signal_group(signal.SIGKILL)
    rows = ds.dataset(tmp_path / "rows", format="parquet").to_table()
    ids = rows.column("id").to_pylist()
    assert Counter(ids) == Counter(range(len(ids)))
