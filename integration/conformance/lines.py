"""Lines of a sink's own code as places: count them, and do something at one of them."""

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
    """Counts the lines that run in the sink's own code, on one thread; acts before one of them."""

    def __init__(
        self, sink: Sink, line: int, reached: Callable[[str], None], *parts: object
    ) -> None:
        """Call `reached` right before the `line`-th line runs, counted from 1; 0 is never.

        It gets the location: file, line, function and text of the line that did not run yet.
        `parts` are what the sink has made, whose code is its own too.
        """
        written = sink.sink if isinstance(sink, OneByOne) else sink
        self.lines = 0
        self.own: list[int] = []
        """Which of them are in the module of the sink's class, where its author wrote."""
        self.location = ""
        """Where the `line`-th line is; empty until it is reached."""
        self._line = line
        self._reached = reached
        self._module = type(written).__module__
        # What a sink inherits is its own code too; the contract itself has none.
        self._packages = {
            kind.__module__.partition(".")[0]
            for made in (written, *parts)
            for kind in type(made).__mro__
            if kind not in (ABC, object) and kind.__module__ != Sink.__module__
        }

    def run(self, call: Callable[[], object]) -> None:
        """Run `call` to its end."""
        # Of this thread alone: a sink's own threads go on while a line is held up, as in a slot.
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> _Trace | None:
        module = str(frame.f_globals.get("__name__", ""))
        # Other packages' frames are not traced: a client library's lines are no lines of the sink.
        return self._at if module.partition(".")[0] in self._packages else None

    def _at(self, frame: FrameType, event: str, argument: Any) -> _Trace:
        if event == "line":
            self.lines += 1
            if frame.f_globals.get("__name__") == self._module:
                self.own.append(self.lines)
            if self.lines == self._line:
                self.location = _location_of(frame)
                self._reached(self.location)
        return self._at


def _location_of(frame: FrameType) -> str:
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    shown = f" `{text}`" if text else ""
    return f"{file}:{line} in {frame.f_code.co_name}{shown}"
