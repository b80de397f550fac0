"""The kit catches sinks that are wrong only when a server is away or a reply is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import pytest
from tests.conformance.broken_server_sinks import GALLERY, BrokenKind
from tests.conformance.sink_targets import PostgresTarget

from onceflow.core.spi import Sink
from onceflow.integration.conformance import ClauseOutcome, run_clauses
from onceflow.integration.conformance.clause import Clause
from onceflow.integration.conformance.clauses import beginning, breaking, overtaking
from onceflow.integration.conformance.processes import Processes
from onceflow.integration.servers.kinds import OwnDatabase, make_postgres
from onceflow.sinks import PostgresSink

pytestmark = pytest.mark.integration

ROOMS = (breaking.CLAUSES, overtaking.CLAUSES, beginning.CLAUSES)


class BrokenTarget(PostgresTarget):
    """The Postgres target with a broken sink around the good one."""

    def __init__(self, server: OwnDatabase, broken: BrokenKind) -> None:
        super().__init__(server, {"commit_mode": "two_phase", "connect_timeout_s": 3.0})
        self._broken = broken

    def sink_of(self, url: str) -> Sink:
        good = super().sink_of(url)
        assert isinstance(good, PostgresSink)
        return self._broken(good)


@pytest.fixture(scope="module")
def postgres() -> Iterator[OwnDatabase]:
    with make_postgres() as server:
        PostgresTarget(server).create()
        yield server


@pytest.mark.parametrize("broken", GALLERY, ids=lambda sink: sink.__name__)
def test_broken_sink_fails_on_the_clause_that_it_breaks(
    broken: BrokenKind, postgres: OwnDatabase, onceflow_processes: Processes
) -> None:
    clauses = [one for one in chain(*ROOMS) if one.id == broken.breaks]
    assert _failed(broken, clauses, postgres, onceflow_processes) == {broken.breaks}


@pytest.mark.slow
@pytest.mark.parametrize("broken", GALLERY, ids=lambda sink: sink.__name__)
def test_broken_sink_fails_on_no_other_clause(
    broken: BrokenKind, postgres: OwnDatabase, onceflow_processes: Processes
) -> None:
    (clauses,) = (room for room in ROOMS if broken.breaks in [clause.id for clause in room])
    assert _failed(broken, clauses, postgres, onceflow_processes) == {broken.breaks}


def _failed(
    broken: BrokenKind, clauses: Sequence[Clause], postgres: OwnDatabase, processes: Processes
) -> set[str]:
    results = list(run_clauses(lambda: BrokenTarget(postgres, broken), clauses, processes))
    return {result.clause.id for result in results if result.outcome is ClauseOutcome.FAILED}
