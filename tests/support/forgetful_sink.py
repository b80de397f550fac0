"""A directory sink that forgets what it was told to, and whose recovery a test can hold up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.directory_sink import DirectoryCommitter, DirectorySink

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import Committer, CommitterContext

_HELD_S_MAX = 120.0


@dataclass(frozen=True)
class ForgetfulSink(DirectorySink):
    """Committed files leave their proofs' place when these are pruned.

    With `held`, recovery says that it has begun by a file of that name with ".waits", and goes on
    when the file `held` is there.
    """

    held: str = ""

    def committer(self, context: CommitterContext) -> Committer:
        return _Committer(Path(self.directory), context.sink_id, self.held)

    def remember(self) -> None:
        """Have every committed file in its place again."""
        committed = Path(self.directory) / "committed"
        for forgotten in (Path(self.directory) / "forgotten").glob("*"):
            forgotten.rename(committed / forgotten.name)


class _Committer(DirectoryCommitter):
    def __init__(self, directory: Path, sink_id: str, held: str) -> None:
        super().__init__(directory, sink_id)
        self._forgotten = directory / "forgotten"
        self._held = Path(held) if held else None

    def in_doubt(self) -> Sequence[Committable]:
        if self._held is not None:
            self._held.with_suffix(".waits").touch()
            deadline = time.monotonic() + _HELD_S_MAX
            while not self._held.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return super().in_doubt()

    def prune(self, before: CheckpointId) -> None:
        self._forgotten.mkdir(exist_ok=True)
        for path in self._forgotten.with_name("committed").iterdir():
            transaction = TransactionId.parse(path.name.replace("~", "/"))
            if transaction is not None and transaction.checkpoint < before:
                path.rename(self._forgotten / path.name)
