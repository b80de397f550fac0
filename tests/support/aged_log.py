"""A job's decision log as an attempt has left it: what was decided, by whom, how long ago."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onceflow.core.protocol.checkpoints import snapshots
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.storage import ClaimedLog, FileSystemStorage, JobStorage

HOUR_S = 3600.0


@dataclass
class AgedLog:
    """The decision log of one job under `root`; its files are given the age that a test needs."""

    root: Path
    job: str = "payments"
    sink_uid: str = "out"
    _claimed: ClaimedLog | None = field(default=None)

    @property
    def storage(self) -> JobStorage:
        return FileSystemStorage(str(self.root)).open(self.job)

    @property
    def log_id(self) -> str:
        return self.storage.log_id

    def claim(self, *, owner: str = "another-host:1", age_s: float = HOUR_S) -> int:
        """Begin an attempt and return its number."""
        self._claimed = self.storage.log.claim(owner)
        self.age(age_s)
        return int(self._claimed.attempt)

    def decide(
        self,
        checkpoint: int,
        committables: Sequence[Committable] = (),
        *,
        age_s: float = HOUR_S,
        final: bool = False,
    ) -> None:
        """Complete a checkpoint of the newest attempt that lists `committables`."""
        assert self._claimed is not None
        operators = (snapshots.OperatorSnapshot(self.sink_uid, committables=tuple(committables)),)
        decided_ms = int((time.time() - age_s) * 1000)
        self._claimed.append(
            snapshots.CompletedCheckpoint(
                checkpoint=CheckpointId(checkpoint),
                attempt=AttemptId(self._claimed.attempt),
                parallelism=1,
                max_parallelism=128,
                snapshots=(snapshots.SubtaskSnapshot(SubtaskRef("records", 0), operators),),
                triggered_at_ms=decided_ms,
                completed_at_ms=decided_ms,
                final=final,
            )
        )
        self.age(age_s)

    def age(self, age_s: float) -> None:
        """Make everything in the log look `age_s` old."""
        moment = time.time() - age_s
        for record in (self.root / self.job / "log").iterdir():
            os.utime(record, (moment, moment))
