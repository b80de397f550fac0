"""The definition of a function: its source text, and the states that it asks for in `open`.

The source text is used only if it matches the running code.
"""

from __future__ import annotations

import ast
import dis
import inspect
import re
import types
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.plan.compiled_function import (
    BOOLEAN,
    FLOAT,
    INTEGER,
    Kind,
    kind_of_type,
    kind_of_value,
)
from onceflow.core.state import ValueStateDescriptor


def read_definition(process: object, name: str) -> tuple[types.FunctionType, ast.FunctionDef]:
    """Return a method `process` and its definition with line numbers; `name` is for errors.

    Raises:
        ConfigError: The source text cannot be read, or does not match the running code.
    """
    if not isinstance(process, types.FunctionType) or hasattr(process, "__wrapped__"):
        raise _refusal(name, "it is wrapped by a decorator")
    try:
        lines, first = inspect.getsourcelines(process)
    except (OSError, TypeError) as error:
        raise _refusal(name, f"its text cannot be read ({error})") from error
    text = "".join(lines)
    if text[0].isspace():
        # An indented text is valid below an `if`. Removing the indent could change constants.
        text, first = "if True:\n" + text, first - 1
    tree = ast.parse(text)
    ast.increment_lineno(tree, first - 1)
    definition = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    if definition is None or not _is_compiled_from(process.__code__, tree):
        raise _refusal(name, "its text is not that of the code that runs: was its file changed?")
    return process, definition


def _refusal(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{name} cannot be compiled: {reason}; define it in a file or a notebook and start anew, or"
        " leave compiled=True out"
    )


def _is_compiled_from(code: types.CodeType, tree: ast.Module) -> bool:
    """Return True if `code` was compiled from the first function in `tree`, parsed from a file."""
    pending = [compile(tree, code.co_filename, "exec", dont_inherit=True)]
    while pending:
        compiled = pending.pop()
        if compiled.co_name == code.co_name:
            # Names of an enclosing function are globals here, so their instructions differ.
            same_names = {*code.co_names, *code.co_freevars} == {*compiled.co_names}
            same_code = bool(code.co_freevars) or _instructions(code) == _instructions(compiled)
            same_values = code.co_consts == compiled.co_consts
            return same_names and same_code and same_values
        pending += [
            constant for constant in compiled.co_consts if isinstance(constant, types.CodeType)
        ]
    return False


def _instructions(code: types.CodeType) -> set[tuple[str, str, str]]:
    """Return the instructions of `code` with their positions, to compare two compilations.

    Python 3.10 has no positions: there, the instructions are numbered. Jumps are left out and all
    loads and calls get one name, because Python may compile the same text to blocks in another
    order, and to other instructions for calls of imported names.
    """
    jumps = {*dis.hasjrel, *dis.hasjabs, dis.EXTENDED_ARG}
    return {
        (
            re.sub("^(LOAD|CALL|PRECALL|PUSH).*", "call", instruction.opname),
            repr(instruction.argval),
            str(getattr(instruction, "positions", number)),
        )
        for number, instruction in enumerate(
            instruction
            for instruction in dis.get_instructions(code)
            if instruction.opcode not in jumps
        )
    }


@dataclass(frozen=True, slots=True)
class RecordedState:
    """A record of a state, stored in the copy's attribute that holds the state in a slot."""

    descriptor: ValueStateDescriptor[Any]
    kind: Kind


class OpeningStates:
    """The context with which the copy opens. Records requested states instead of creating them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def value_state(self, descriptor: ValueStateDescriptor[Any]) -> RecordedState:
        """Return the record of `descriptor`."""
        kind = {int: INTEGER, float: FLOAT, bool: BOOLEAN}.get(cast("Any", descriptor.type))
        if isinstance(descriptor.type, pa.DataType):
            kind = kind_of_type(descriptor.type)
            if kind in (INTEGER, FLOAT) and descriptor.type not in (pa.int64(), pa.float64()):
                kind = None
        reason = ""
        if kind is None:
            reason = (
                f"is of type {descriptor.type}; give int, float, bool, or an Arrow type of"
                " timestamps (s, ms or us, without a zone or in UTC)"
            )
        elif descriptor.ttl is not None:
            reason = "has a time to live, which compiled functions do not have"
        elif descriptor.default is None:
            reason = "has no default, and a kernel has no None; give default=…"
        elif kind in (INTEGER, FLOAT, BOOLEAN) and kind_of_value(descriptor.default) != kind:
            reason = f"has default {descriptor.default!r}, which is not {kind} of 64 bits; give one"
        if kind is None or reason:
            raise ConfigError(
                f"{self._name} cannot be compiled: state {descriptor.name!r} {reason}, or leave"
                " compiled=True out"
            )
        return RecordedState(descriptor, kind)

    def __getattr__(self, name: str) -> NoReturn:
        raise ConfigError(
            f"{self._name} cannot be compiled: open() asks for {name}, and compiled functions have"
            " value states alone; leave compiled=True out"
        )
