"""Proves a two-phase sink against its real target, clause by clause of the contract."""

from onceflow.integration.conformance.clause import Clause, ClauseOutcome, ClauseResult, run_clauses
from onceflow.integration.conformance.suite import SinkConformance
from onceflow.integration.conformance.target import NotTestable, SinkTarget, Violation

__all__ = [
    "Clause",
    "ClauseOutcome",
    "ClauseResult",
    "NotTestable",
    "SinkConformance",
    "SinkTarget",
    "Violation",
    "run_clauses",
]
