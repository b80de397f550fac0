"""A tracer that counts the lines of a sink's own code and acts at one of them."""

from __future__ import annotations

import linecache
import sys
from abc import ABC
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

from onceflow.core.spi import Sink
from onceflow.integration.conformance.sink_job import OneByOne

_Trace: TypeAlias = Callable[[FrameType, str, Any], Any]


class LineTracer:
    """A tracer that counts the executed lines of a sink's code on one thread, and acts at one."""

    def __init__(
        self, sink: Sink, line: int, reached: Callable[[str], None], *parts: object
    ) -> None:
        """Call `reached` right before the `line`-th line runs, counted from 1. 0 means never.

        `reached` gets the location of that line: file, line, function and text. `parts` are objects
        that the sink has created, whose code also belongs to the sink.
        """
        written = sink.sink if isinstance(sink, OneByOne) else sink
        self.lines = 0
        self.own: list[int] = []
        """The numbers of the lines in the module of the sink's class."""
        self.location = ""
        """The location of the `line`-th line; empty until it is reached."""
        self._line = line
        self._reached = reached
        self._module = type(written).__module__
        # Inherited code belongs to the sink, too, except the contract's base classes.
        self._packages = {
            kind.__module__.partition(".")[0]
            for made in (written, *parts)
            for kind in type(made).__mro__
            if kind not in (ABC, object) and kind.__module__ != Sink.__module__
        }

    def run(self, call: Callable[[], object]) -> None:
        """Run `call` to its end."""
        # Trace only this thread: a sink's own threads continue while a line is held, as in a slot.
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> _Trace | None:
        module = str(frame.f_globals.get("__name__", ""))
        # Do not trace frames of other packages: lines of a client library are not lines of the
        # sink.
        return self._at if module.partition(".")[0] in self._packages else None

    def _at(self, frame: FrameType, event: str, argument: Any) -> _Trace:
        if event == "line":
            self.lines += 1
            if frame.f_globals.get("__name__") == self._module:
                self.own.append(self.lines)
            if self.lines == self._line:
                self.location = _describe_location(frame)
                self._reached(self.location)
        return self._at


def _describe_location(frame: FrameType) -> str:
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    shown = f" `{text}`" if text else ""
    return f"{file}:{line} in {frame.f_code.co_name}{shown}"
