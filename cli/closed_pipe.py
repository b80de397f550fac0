"""Output of commands into a pipe whose reader has ended, such as `head`.

Python raises an error at the first write to such a pipe. A command would then stop half way, and
its exit status would say that it failed. Here, the command goes on without this output.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from typing import TextIO, cast

import typer

from onceflow.core.unread_output import UnreadOutput

EXIT_CLOSED_PIPE = 141
"""The exit status of commands that print until their reader ends. A shell shows it for SIGPIPE."""


def ignore_closed_pipes() -> None:
    """Let stdout and stderr drop their output once its reader has ended, if they are pipes."""
    sys.stdout = _open_pipe(sys.stdout)
    sys.stderr = _open_pipe(sys.stderr)


def end_if_unread() -> None:
    """End a command that prints repeatedly if nothing reads its output any more.

    Raises:
        typer.Exit: The reader of stdout has ended.
    """
    binary = getattr(sys.stdout, "buffer", None)
    pipe = getattr(binary, "raw", binary)
    if isinstance(pipe, UnreadOutput) and pipe.is_unread:
        raise typer.Exit(EXIT_CLOSED_PIPE)


def _open_pipe(output: TextIO) -> TextIO:
    """Return a file that writes to the pipe of `output`, or `output` itself if it is no pipe."""
    if type(output) is not io.TextIOWrapper:
        return output
    output.flush()
    number, binary = output.fileno(), cast("object", output.buffer)
    mode = os.fstat(number).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return output
    pipe = UnreadOutput(number, "w", closefd=False)
    return io.TextIOWrapper(
        pipe if isinstance(binary, io.RawIOBase) else io.BufferedWriter(pipe),
        encoding=output.encoding,
        errors=output.errors,
        line_buffering=output.line_buffering,
        write_through=output.write_through,
    )
