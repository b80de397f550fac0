"""What the user wrote, on its way to the slots: the graph with its functions, and the backend.

Sources, sinks and functions may hold passwords, and what is inside a Spark task is written to the
disks of executors. So a program is pickled once, when the job is started, and reaches each slot in
its `Deploy` message, over the authenticated control stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from pyspark import cloudpickle

from onceflow.core.graph import Graph
from onceflow.core.state import StateBackend

_pickle = cast("Any", cloudpickle)  # Spark's own copy has no types


@dataclass(frozen=True, slots=True)
class Program:
    """The part of a job that may hold secrets and functions."""

    graph: Graph
    backend: StateBackend


def pickled_program(program: Program) -> bytes:
    """Return `program` as bytes; closures and what `__main__` defines go by value."""
    return cast("bytes", _pickle.dumps(program))


def unpickled_program(data: bytes) -> Program:
    """Return the program that `data` holds. Runs in a slot."""
    return cast("Program", _pickle.loads(data))
