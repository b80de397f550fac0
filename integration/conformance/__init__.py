"""Proves a two-phase sink against its real target, clause by clause of the contract."""

from onceflow.integration.conformance.clause import Clause, Violation
from onceflow.integration.conformance.runner import ClauseResult, Verdict, run_clauses
from onceflow.integration.conformance.suite import SinkConformance
from onceflow.integration.conformance.target import NotTestable, SinkTarget

__all__ = [
    "Clause",
    "ClauseResult",
    "NotTestable",
    "SinkConformance",
    "SinkTarget",
    "Verdict",
    "Violation",
    "run_clauses",
]
