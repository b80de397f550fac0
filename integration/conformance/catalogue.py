"""All clauses, in the order in which they are run: each after those that it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from onceflow.integration.conformance.clause import Clause
from onceflow.integration.conformance.clauses import (
    breaking,
    deciding,
    gathering,
    killing,
    listing,
    overtaking,
    recovering,
    running,
    writing,
)

CLAUSES: tuple[Clause, ...] = (
    *writing.CLAUSES,
    *deciding.CLAUSES,
    *listing.CLAUSES,
    *gathering.CLAUSES,
    *recovering.CLAUSES,
    *breaking.CLAUSES,
    *killing.CLAUSES,
    *overtaking.CLAUSES,
    *running.CLAUSES,
)

NOT_OF_SINKS: Mapping[int, str] = MappingProxyType(
    {
        5: "no transaction of ours times out; its age is a metric",
        6: "the coordinator decides only when every subtask has acked",
        8: "retries are `CommitQueue`'s",
        9: "the end of bounded input is the engine's",
        10: "the end of bounded input is the engine's",
        12: "committables never travel in data channels",
        34: "there is one way of naming transactions",
        39: "which transactions are whose is the decision log's to say, never a writer's state",
    }
)
"""Scenarios S1-S43 that are no clause of a sink, and why; the engine's own tests have them."""
