"""A directory sink whose calls a test scripts: they wait, fail, or answer something else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from tests.support.directory_sink import DirectorySink
from typing_extensions import override

from onceflow.core.spi import Committer, CommitterContext, SinkWriter, WriterContext

Step = Callable[..., object]
_Part = TypeVar("_Part", SinkWriter, Committer)

_WAITS_S_MAX = 120.0


@dataclass(frozen=True)
class ScriptedSink(DirectorySink):
    """Runs a step before each call that `steps` names.

    The names are `validate` and `open` of the sink, `write`, `pre_commit` and `close` of a writer,
    `commit`, `abort`, `in_doubt` and `prune` of a committer. A step gets the arguments of the call.
    If the step returns None, the call takes place. Otherwise the call returns what the step
    returned.
    """

    steps: Mapping[str, Step] = field(default_factory=dict[str, Step], hash=False)
    target: str = ""
    """What `describe_target` returns, if not empty."""

    @override
    def validate(self, context: CommitterContext, schema: pa.Schema) -> None:
        self._scripted(super().validate, "validate")(context, schema)

    @override
    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        self._scripted(super().open, "open")(context, schema)

    @override
    def describe_target(self) -> str:
        return self.target or super().describe_target()

    @override
    def writer(self, context: WriterContext) -> SinkWriter:
        return self._script(super().writer(context), ("write", "pre_commit", "close"))

    @override
    def committer(self, context: CommitterContext) -> Committer:
        return self._script(super().committer(context), ("commit", "abort", "in_doubt", "prune"))

    def release(self) -> None:
        """Make the file `released`, on which steps of `released_in` wait."""
        released_in(self.directory).touch()

    def _script(self, part: _Part, names: Sequence[str]) -> _Part:
        for name in names:
            if name in self.steps:
                setattr(part, name, self._scripted(getattr(part, name), name))
        return part

    def _scripted(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        step = self.steps.get(name)

        def scripted(*arguments: object) -> Any:
            answer = None if step is None else step(*arguments)
            return call(*arguments) if answer is None else answer

        return scripted


def released_in(directory: str | Path) -> Path:
    """Return the file that `release` makes in the directory of a sink."""
    return Path(directory, "released")


def throttled_sink(directory: Path, pause_s: float = 0.02) -> ScriptedSink:
    """Return a sink that takes `pause_s` for each batch until it is released.

    So rows wait in every channel before it.
    """
    pause = Pause(released_in(directory), pause_s)
    return ScriptedSink(str(directory), {"write": pause})


@dataclass(frozen=True)
class When:
    """A step that answers while `file` is there, or is not there: raises or returns `answer`."""

    file: Path
    answer: object
    there: bool = True

    def __call__(self, *arguments: object) -> object:
        del arguments
        if self.file.exists() is not self.there:
            return None
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@dataclass(frozen=True)
class Wait:
    """A step that waits while `file` is there, or is not there."""

    file: Path
    there: bool = False

    def __call__(self, *arguments: object) -> None:
        del arguments
        deadline = time.monotonic() + _WAITS_S_MAX
        while self.file.exists() is self.there and time.monotonic() < deadline:
            time.sleep(0.01)


@dataclass(frozen=True)
class Pause:
    """A step that takes `seconds` until `file` is there."""

    file: Path
    seconds: float

    def __call__(self, *arguments: object) -> None:
        del arguments
        if not self.file.exists():
            time.sleep(self.seconds)


@dataclass(frozen=True)
class Once:
    """A step that raises `error` the first time of all processes, and makes `file` then."""

    file: Path
    error: Exception

    def __call__(self, *arguments: object) -> None:
        del arguments
        try:
            self.file.touch(exist_ok=False)
        except FileExistsError:
            return
        raise self.error
