"""A directory sink whose target takes no commit for now, as one that is read-only or locked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.directory_sink import DirectorySink

from onceflow.core.protocol import committables
from onceflow.core.spi import Committer, CommitterContext


@dataclass(frozen=True)
class ReluctantSink(DirectorySink):
    """Takes no commit while the file `closed` is in its directory."""

    def committer(self, context: CommitterContext) -> Committer:
        return _Committer(super().committer(context), self._closed)

    def shut(self) -> None:
        """Take no commit from now on."""
        self._closed.parent.mkdir(parents=True, exist_ok=True)
        self._closed.touch()

    def reopen(self) -> None:
        """Take commits again."""
        self._closed.unlink()

    @property
    def _closed(self) -> Path:
        return Path(self.directory) / "closed"


class _Committer(Committer):
    def __init__(self, inner: Committer, closed: Path) -> None:
        self._inner = inner
        self._closed = closed

    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        if self._closed.exists():
            return committables.RetryLater("the target takes no commit for now")
        return self._inner.commit(committable)

    def abort(self, committable: committables.Committable) -> committables.AbortOutcome:
        return self._inner.abort(committable)

    def in_doubt(self) -> list[committables.Committable]:
        return list(self._inner.in_doubt())

    def close(self) -> None:
        self._inner.close()
