"""Global committers that are wrong in one way, and the clause on which the kit catches each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from deltalake import DeltaTable
from examples.delta_sink import DeltaCommitter, DeltaSink
from tests.conformance.test_delta_example_conforms import DeltaTarget

from onceflow import connectors
from onceflow.integration.conformance import ClauseOutcome, run_clauses
from onceflow.integration.conformance.clause import Clause
from onceflow.integration.conformance.clause_catalog import CLAUSES
from onceflow.integration.conformance.clauses import batching, killing, overtaking, running
from onceflow.integration.conformance.processes import Processes


class _TakesOlder(DeltaCommitter):
    """Compares with the last checkpoint for equality, as a sink does that expects no late word."""

    def commit_checkpoint(
        self, checkpoint: connectors.CheckpointId, committables: Sequence[connectors.Committable]
    ) -> connectors.CommitOutcome:
        if self.read_committed_through() == checkpoint:
            return connectors.AlreadyCommitted()
        return self.append(DeltaTable(self.path), checkpoint, committables)


class _SkipsWhatIsGone(DeltaCommitter):
    """Makes a version of the files that it finds."""

    def commit_checkpoint(
        self, checkpoint: connectors.CheckpointId, committables: Sequence[connectors.Committable]
    ) -> connectors.CommitOutcome:
        found = [
            committable
            for committable in committables
            if self.files.path(committable.transaction).exists()
        ]
        return super().commit_checkpoint(checkpoint, found)


class _OneVersionAFile(DeltaCommitter):
    """Makes a version of each file, all with the proof of the checkpoint."""

    def commit_checkpoint(
        self, checkpoint: connectors.CheckpointId, committables: Sequence[connectors.Committable]
    ) -> connectors.CommitOutcome:
        outcomes = [
            super(_OneVersionAFile, self).commit_checkpoint(checkpoint, [c]) for c in committables
        ]
        return outcomes[0]


@dataclass(frozen=True)
class BrokenDeltaSink(DeltaSink):
    """A Delta sink with one of them."""

    kind: str = ""
    kinds: ClassVar[dict[str, type[DeltaCommitter]]] = {
        kind.__name__: kind for kind in (_TakesOlder, _SkipsWhatIsGone, _OneVersionAFile)
    }

    def committer(self, context: connectors.CommitterContext) -> connectors.GlobalCommitter:
        return self.kinds[self.kind](self.path, context.sink_id)


BREAKS = {
    "_TakesOlder": ("committed-checkpoint-only-rises", "prune-keeps-what-is-asked-for"),
    "_SkipsWhatIsGone": ("checkpoint-is-whole-or-lost", "unknown-is-lost"),
    "_OneVersionAFile": ("checkpoint-is-committed-whole", "rescaling-loses-nothing"),
}
"""The clause on which each fails, and one on which it may fail as well."""


@pytest.mark.parametrize("kind", BREAKS)
def test_broken_global_committer_fails_on_the_clause_that_it_breaks(
    kind: str, tmp_path: Path, onceflow_processes: Processes
) -> None:
    breaks, _ = BREAKS[kind]
    tried = [one for one in CLAUSES if one.id == breaks]
    assert _failed(kind, tried, tmp_path, onceflow_processes) == {breaks}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BREAKS)
def test_broken_global_committer_fails_on_no_other_clause(
    kind: str, tmp_path: Path, onceflow_processes: Processes
) -> None:
    long = (*killing.CLAUSES, *overtaking.CLAUSES, *running.CLAUSES, *batching.CLAUSES)
    tried = [one for one in CLAUSES if one not in long]
    assert _failed(kind, tried, tmp_path, onceflow_processes) <= set(BREAKS[kind])


def _failed(kind: str, clauses: Sequence[Clause], tmp: Path, processes: Processes) -> set[str]:
    results = list(run_clauses(_targets(tmp, kind), clauses, processes))
    return {result.clause.id for result in results if result.outcome is ClauseOutcome.FAILED}


def _targets(directory: Path, kind: str) -> Callable[[], DeltaTarget]:
    numbers = itertools.count()

    class Broken(DeltaTarget):
        def sink(self) -> DeltaSink:
            return BrokenDeltaSink(self.path, kind)

    def make() -> DeltaTarget:
        own = directory / str(next(numbers))
        own.mkdir()
        return Broken(own)

    return make
