"""What a person sees while the demo runs: bars and lines, all on stderr."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from typing_extensions import Self


class Narrator:
    """Bars on a terminal, plain lines elsewhere, nothing when quiet."""

    def __init__(self, *, quiet: bool) -> None:
        """Describe it; entering the context shows it."""
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._bar_of: dict[str, TaskID] = {}

    def say(self, line: str) -> None:
        """Print one line above the bars."""
        self._console.print(line, markup=False, soft_wrap=True)

    def bar(self, name: str, total: int) -> Callable[[int], None]:
        """Show a bar; return what sets how far it has come. One name is one bar."""
        if name not in self._bar_of:
            self._bar_of[name] = self._bars.add_task(name, total=total)
        task = self._bar_of[name]

        def advance(completed: int) -> None:
            self._bars.update(task, completed=min(completed, total))

        return advance

    def note(self, name: str, text: str) -> None:
        """Show `text` beside the bar called `name`; nothing where there are no bars."""
        if name in self._bar_of:
            self._bars.update(self._bar_of[name], description=f"{name} ({text})")

    def __enter__(self) -> Self:
        """Show the bars."""
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the bars as they stand."""
        self._bars.stop()
