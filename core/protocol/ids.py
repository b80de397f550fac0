"""The numbers and names of the protocol, each with its rule.

Invariants:
    1 <= AttemptId                     0 = no attempt yet
    0 <= CheckpointId                  0 = genesis: where the sources start, before any record
    0 <= SubtaskRef.index < parallelism <= max parallelism <= 32768
    len(str(TransactionId)) < 64       MySQL's gtrid is the shortest name that a database allows
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import NewType

AttemptId = NewType("AttemptId", int)
"""The number of an attempt of a job. A higher attempt fences every lower one."""

CheckpointId = NewType("CheckpointId", int)
"""The number of a barrier. It rises by one with each triggered checkpoint, over all attempts of a
job."""

GENESIS = CheckpointId(0)
"""The checkpoint before the first barrier: start positions of the sources and nothing else."""

SINK_ID_LENGTH_MAX = 32
TRANSACTION_ID_LENGTH_MAX = 63
PARALLELISM_MAX = 32_768

_SINK_ID = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_MOST = {
    "attempt": 10**8 - 1,
    "checkpoint": 10**10 - 1,
    "subtask": 10**5 - 1,
    "sequence": 10**4 - 1,
}
_TRANSACTION_ID = re.compile(r"([A-Za-z0-9_.-]{1,32})/(\d{1,8})/(\d{1,10})/(\d{1,5})/(\d{1,4})")


@dataclass(frozen=True, slots=True, order=True)
class SubtaskRef:
    """A parallel instance of a chain of operators."""

    chain: str
    index: int

    def __str__(self) -> str:
        return f"{self.chain}[{self.index}]"


def committer_ref(uid: str) -> SubtaskRef:
    """Return the reference of the driver's committer of sink `uid`, which is no subtask."""
    return SubtaskRef(uid, -1)


@dataclass(frozen=True, slots=True, order=True)
class TransactionId:
    """The name of one prepared transaction: deterministic, printable, unique over a sink's life.

    Written as `<sink id>/<attempt>/<checkpoint>/<subtask>/<sequence>`. The sink id outlives
    attempts, rescaling and resubmission. Because of the attempt, a replayed checkpoint does not
    reuse a name that an earlier attempt left in the database.
    """

    sink_id: str
    attempt: int
    checkpoint: int
    subtask: int
    sequence: int = 0

    def __post_init__(self) -> None:
        if _TRANSACTION_ID.fullmatch(str(self)):
            return
        if not _SINK_ID.fullmatch(self.sink_id):
            raise ValueError(
                f"transaction id {str(self)!r} has sink id {self.sink_id!r}, which is not"
                f" 1-{SINK_ID_LENGTH_MAX} letters, digits, '_', '.', '-'"
            )
        number = next(name for name, most in _MOST.items() if not 0 <= getattr(self, name) <= most)
        raise ValueError(
            f"transaction id {str(self)!r} has {number} {getattr(self, number)}, which is not"
            f" within 0..{_MOST[number]}"
        )

    def __str__(self) -> str:
        return f"{self.sink_id}/{self.attempt}/{self.checkpoint}/{self.subtask}/{self.sequence}"

    def name(self, *, separator: str = "/", length_max: int = TRANSACTION_ID_LENGTH_MAX) -> str:
        """Return a name of at most `length_max` characters, as unique as the id.

        If the sink id is too long for the name, it ends in 10 hex digits of its SHA-256.

        Raises:
            ValueError: No unique name is that short.
        """
        numbers = (self.attempt, self.checkpoint, self.subtask, self.sequence)
        tail = "".join(f"{separator}{number}" for number in numbers)
        return _within(self.sink_id, length_max - len(tail)) + tail

    @classmethod
    def parse(cls, text: str) -> TransactionId | None:
        """Return the id in `text`, or None if it is not the name of a onceflow transaction."""
        match = _TRANSACTION_ID.fullmatch(text)
        if match is None:
            return None
        sink_id, attempt, checkpoint, subtask, sequence = match.groups()
        return cls(sink_id, int(attempt), int(checkpoint), int(subtask), int(sequence))


def sink_id_of(job: str, uid: str) -> str:
    """Return the sink id of operator `uid` in `job`: readable, stable, never over 32 bytes.

    A name that is too long or holds other characters ends in 10 hex digits of its SHA-256. So two
    different pairs never share an id by truncation.
    """
    name = f"{job}.{uid}"
    if _SINK_ID.fullmatch(name) and "." not in job:
        return name
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    digest = hashlib.sha256(f"{len(job)}:{name}".encode()).hexdigest()[:10]
    return f"{readable[: SINK_ID_LENGTH_MAX - 11]}-{digest}"


def _within(text: str, length_max: int) -> str:
    if len(text) <= length_max:
        return text
    if length_max < 12:
        raise ValueError(f"{text!r} cannot be shortened to {length_max} characters and stay unique")
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{text[: length_max - 11]}-{digest}"
