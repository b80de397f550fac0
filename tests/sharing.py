"""Which process of a run gets which tests: those that need a server go where it runs already.

Each process starts its own Spark session, broker and databases when the first of its tests asks
for them. In each of three processes they would cost a minute of processor time, and gigabytes.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

START_S: Mapping[str, float] = MappingProxyType(
    {"spark": 18.0, "kafka": 8.0, "mysql": 4.0, "mariadb": 3.0}
)
"""Processor seconds until a server has warmed up, by the word in the ids of tests that use it."""
_WORDS = re.compile("|".join(START_S))
_WITHOUT_SERVERS = "tests/unit/"


def servers_of(node_ids: Iterable[str]) -> frozenset[str]:
    """Return which servers the tests start, going by their ids."""
    return frozenset(word for node_id in node_ids for word in _words_in(node_id))


@cache
def _words_in(node_id: str) -> frozenset[str]:
    # All that waits is looked at whenever a process gets its next tests.
    if node_id.startswith(_WITHOUT_SERVERS):
        return frozenset()
    return frozenset(_WORDS.findall(node_id.lower()))


def import_share(number: int, count: int) -> None:
    """Import every `count`th test module, from the module `number` on, before all are collected.

    In a fresh clone pytest rewrites the assertions of a thousand modules, ours among them, and
    keeps what it has compiled. All processes collect in the same order: each would do all of it.
    """
    tests = Path(__file__).parent
    for path in sorted(tests.glob("*/**/test_*.py"))[number::count]:
        name = ".".join(path.relative_to(tests.parent).with_suffix("").parts)
        # What cannot be imported is told when it is collected.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


def rank(
    needed: Collection[str], own: Collection[str], others: Collection[str]
) -> tuple[float, bool]:
    """Return how well tests suit a process: the lowest goes first.

    What would start a second time comes last. What uses servers that only this process has comes
    first, so that no other process has to start them at the end.
    """
    again = set(needed).difference(own).intersection(others)
    return sum(START_S[name] for name in again), set(needed).isdisjoint(own)


class KeepServersTogether(LoadScopeScheduling):
    """Gives out classes and modules as `--dist loadscope` does, but not in the order of the queue.

    In the controlling process.
    """

    _running: defaultdict[WorkerController, set[str]]

    def schedule(self) -> None:
        """Assign the first tests, or those that a replaced process has left."""
        if self.collection is None:
            self._running = defaultdict(set)
        super().schedule()

    def _assign_work_unit(self, node: WorkerController) -> None:
        own = self._running[node]
        others = set[str]().union(*self._running.values()) - own
        needed = {scope: servers_of(tests) for scope, tests in self.workqueue.items()}
        best = min(needed, key=lambda scope: rank(needed[scope], own, others))
        own |= needed[best]
        self.workqueue.move_to_end(best, last=False)
        super()._assign_work_unit(node)
