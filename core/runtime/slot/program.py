"""The user's program on its way to the slots: the graph with its functions, and the backend.

Sources, sinks and functions may hold passwords, and Spark writes the content of a task to
executors' disks. So a program is pickled once, when the job is started, and sent to each slot in
its `Deploy` message, over the authenticated control stream.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import cast

import cloudpickle

from onceflow.core.errors import ConfigError
from onceflow.core.plan.graph import Graph
from onceflow.core.runtime.slot.pickling import pickle_by_value
from onceflow.core.state import StateBackend

MODULES_ON_EXECUTORS = (
    "send it with spark-submit --py-files, spark.submit.pyFiles or SparkContext.addPyFile, or"
    " install it in the Python environment of every executor (spark.archives for a packed one)"
)


@dataclass(frozen=True, slots=True)
class Program:
    """The part of a job that may hold secrets and functions."""

    graph: Graph
    backend: StateBackend


def pickle_program(program: Program) -> bytes:
    """Pickle `program`. Closures and objects defined in `__main__` go by value.

    Raises:
        ConfigError: An object in it cannot be pickled; names the operator, and the variable of its
            function if known.
    """
    try:
        return pickle_by_value(program)
    except Exception as error:
        raise ConfigError(
            f"{_culprit(program)} cannot be sent to the slots: {type(error).__name__}: {error}."
            " Create locks, connections and sessions where they are used: in a KeyedFunction's"
            " open(), in a sink's writer(), or inside the function"
        ) from error


def unpickle_program(data: bytes) -> Program:
    """Unpickle a program. Runs in a slot.

    Raises:
        ConfigError: This executor lacks a required module, or has another one of that name.
    """
    try:
        return cast("Program", cloudpickle.loads(data))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the pipeline needs the module {error.name!r}, which the executor on"
            f" {socket.gethostname()} does not have: {MODULES_ON_EXECUTORS}"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"the executor on {socket.gethostname()} cannot load the pipeline:"
            f" {type(error).__name__}: {error}; the executor needs the same modules as the"
            f" driver: {MODULES_ON_EXECUTORS}"
        ) from error


def _culprit(program: Program) -> str:
    """Return the name of the part of `program` that cannot be pickled, as precisely as possible."""
    for operator in program.graph.operators:
        for field in fields(operator.work):
            value = getattr(operator.work, field.name)
            if not _pickles(value):
                named = getattr(value, "__qualname__", type(value).__qualname__)
                held = "".join(f", which holds {name!r}," for name in _unpicklable_names(value))
                return f"{field.name} {named} of operator {operator.uid!r}{held}"
    return "the state backend" if not _pickles(program.backend) else "the pipeline"


def _unpicklable_names(value: object) -> Iterator[str]:
    """Yield the name of the first variable used by a function that cannot be pickled."""
    if not inspect.isfunction(value):
        return
    variables = inspect.getclosurevars(value)
    for name, held in (*variables.nonlocals.items(), *variables.globals.items()):
        if not _pickles(held):
            yield name
            return


def _pickles(value: object) -> bool:
    try:
        pickle_by_value(value)
    except Exception:
        return False
    return True
