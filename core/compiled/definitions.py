"""The source text of functions, which is used only if it matches the running code."""

from __future__ import annotations

import ast
import dis
import inspect
import re
import types

from onceflow.core.errors import ConfigError


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
    """Return the instructions with their positions (Python 3.10: numbers), but without jumps.

    Equal texts may be compiled to blocks in another order, and so to other jumps. Imported names
    may be called by other instructions.
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
