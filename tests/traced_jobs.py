"""After each test, the traces of its jobs must follow the rules of the protocol.

`CheckTraces` runs in each process of pytest. All processes that tests start record their steps. The
trace of a job that several tests share is checked as a whole after each of them. A test that breaks
a condition of the guarantee on purpose has the marker `untraced`, with its reason.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from collections import defaultdict, deque
from collections.abc import Collection, Generator
from pathlib import Path
from typing import BinaryIO

import pytest

from onceflow.core.traces import VARIABLE
from onceflow.integration.traces.events import Trace, decode_event
from onceflow.integration.traces.rules import check_trace

UNCHECKED = ("tests/exploration/", "tests/unit/")
"""The folders whose tests call parts of a job without the others, or play one log many times."""

_KEPT_MAX = 200
"""The number of further tests for which the trace of a job is kept. Tests of a module may share a
job."""
_OPEN_MAX = 20
"""The number of takes in which a file is read."""
_LOG = re.compile(rb'"log":"((?:[^"\\]|\\.)*)"')


class CheckTraces:
    """A plugin that fails a test whose jobs have taken a step that the protocol forbids."""

    def __init__(self) -> None:
        """Have all processes that tests start record their steps in a new directory."""
        self._directory = tempfile.TemporaryDirectory(prefix="onceflow-traces-")
        self._written = Path(self._directory.name)
        os.environ[VARIABLE] = self._directory.name
        self._open: deque[list[tuple[str, BinaryIO]]] = deque()
        """The files of the last takes, each with its process."""
        self._lines: dict[bytes, defaultdict[str, list[bytes]]] = {}
        """The lines of each process, by decision log."""
        self._grown_at: dict[bytes, int] = {}
        """The number of the last test in which a log had new lines."""
        self._untraced: set[bytes] = set()
        """The decision logs of tests with the marker `untraced`."""
        self._tests = 0

    def pytest_unconfigure(self) -> None:
        """Delete the directory."""
        while self._open:
            self._close_oldest()
        self._directory.cleanup()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Check the traces that have grown during the test."""
        report = yield
        if call.when == "teardown":
            broken = self._check(is_untraced=item.get_closest_marker("untraced") is not None)
            if broken and report.passed and not item.nodeid.startswith(UNCHECKED):
                report.outcome = "failed"
                report.longrepr = broken
        return report

    def _check(self, *, is_untraced: bool) -> str:
        self._tests += 1
        grown = {log for log, _ in self._take()}
        if not grown:
            return ""
        # The causes of all lines of the first time are found by the second time.
        again = self._take()
        grown |= {log for log, _ in again}
        recent = {line for _, line in again}
        if is_untraced:
            self._untraced |= grown
        broken = [
            violation
            for log in sorted(grown - self._untraced)
            for violation in check_trace(self._decode(log, recent))
        ]
        for log in [log for log, at in self._grown_at.items() if at < self._tests - _KEPT_MAX]:
            del self._lines[log], self._grown_at[log]
        return "\n\n".join(map(str, broken))

    def _take(self) -> list[tuple[bytes, bytes]]:
        """Take the lines that processes have written. Return each with its log."""
        files: list[tuple[str, BinaryIO]] = []
        # A process opens its file again for each line. One that has opened it before it is unlinked
        # still writes into it, so the files of the last takes are read again, before newer ones.
        for path in sorted(self._written.iterdir()):
            files.append((path.stem, path.open("rb")))
            path.unlink()
        self._open.append(files)
        taken: list[tuple[bytes, bytes]] = []
        for process, file in itertools.chain.from_iterable(self._open):
            for line in file.read().splitlines():
                if (found := _LOG.search(line)) is not None and found[1]:
                    log = found[1]
                    self._lines.setdefault(log, defaultdict(list))[process].append(line)
                    self._grown_at[log] = self._tests
                    taken.append((log, line))
        while len(self._open) > _OPEN_MAX:
            self._close_oldest()
        return taken

    def _close_oldest(self) -> None:
        for _, file in self._open.popleft():
            file.close()

    def _decode(self, log: bytes, recent: Collection[bytes]) -> Trace:
        return {
            process: [decode_event(process, line, is_recent=line in recent) for line in lines]
            for process, lines in self._lines[log].items()
        }
