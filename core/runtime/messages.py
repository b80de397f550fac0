"""The control plane's messages between the job driver and its slots, and their bytes.

A message is msgpack: `[name of its class, its fields]`. Every message of a slot carries its
attempt; the driver drops those of another attempt, and a slot that hears of a newer attempt exits
(I7).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import msgspec

from onceflow.core.errors import MessageCorrupt
from onceflow.core.protocol.alignment import Barrier
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.snapshots import StateHandle, SubtaskSnapshot
from onceflow.core.protocol.splits import Split

# --- slot to driver ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A slot is up: who it is, where its channels can be reached, what it runs."""

    attempt: AttemptId
    slot: int
    pid: int
    parent_pid: int
    """The process that forked the slot: the executor's Python daemon."""
    host: str
    data_address: str
    versions: dict[str, str]
    storage_probe: str = ""
    """What the slot read where the driver had written a token: shows that storage is shared."""


@dataclass(frozen=True, slots=True)
class Running:
    """Every chain of the slot has its state and its channels, and has begun."""

    attempt: AttemptId
    slot: int
    dropped: tuple[str, ...] = ()
    """State that the checkpoint held and no operator takes, for people."""


@dataclass(frozen=True, slots=True)
class Acked:
    """One subtask's part of a checkpoint is durable."""

    attempt: AttemptId
    checkpoint: CheckpointId
    snapshot: SubtaskSnapshot


@dataclass(frozen=True, slots=True)
class Declined:
    """One subtask cannot take part in a checkpoint; it goes on with the stream."""

    attempt: AttemptId
    checkpoint: CheckpointId
    subtask: SubtaskRef
    reason: str


@dataclass(frozen=True, slots=True)
class CommittedThrough:
    """A subtask has heard of `checkpoint`, and has nothing left to commit up to it."""

    attempt: AttemptId
    subtask: SubtaskRef
    checkpoint: CheckpointId
    commit_ms: float = 0.0
    committed: CheckpointId = GENESIS
    """What its sinks have committed, whether or not the subtask has had time to hear of it."""


@dataclass(frozen=True, slots=True)
class SourceExhausted:
    """A bounded source subtask has emitted its last record."""

    attempt: AttemptId
    subtask: SubtaskRef


@dataclass(frozen=True, slots=True)
class Failed:
    """A slot cannot go on.

    `error_class` is a name of `onceflow.core.errors`, or of another module.
    """

    attempt: AttemptId
    slot: int
    error_class: str
    message: str
    trace: str
    retry: str
    fingerprint: str = ""
    """Equal for equal mistakes of the program; empty for what is none."""


@dataclass(frozen=True, slots=True)
class SubtaskMetrics:
    """What one subtask has done since it began; times in seconds."""

    subtask: SubtaskRef
    records_in: int = 0
    records_out: int = 0
    busy_s: float = 0.0
    backpressured_s: float = 0.0
    cpu_s: float = 0.0
    input_batches: int = 0
    """Waiting in the input channels now."""
    rejected: int = 0
    """Bad records left out: dropped, or sent to the dead letters."""


@dataclass(frozen=True, slots=True)
class SinkMetrics:
    """What one subtask's transactions of one sink have gone through since it began."""

    uid: str
    sink_id: str
    subtask: int
    open: int = 0
    """1 while rows are written that no barrier has followed yet."""
    prepared: int = 0
    """In doubt now: pre-committed, and not known to be committed."""
    committed: int = 0
    retried: int = 0
    """Tries of commits that did not succeed and were repeated."""
    rows_committed: int = 0
    rows_rejected: int = 0
    """Bad rows that the writer left out."""
    oldest_prepared_s: float = 0.0
    """Age of what has been in doubt for longest; 0 when nothing is."""
    last_commit_ms: float = 0.0
    """From hearing the decision to the target's word that the rows are visible."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A slot is alive. Also a driver's answer, with `slot` -1."""

    attempt: AttemptId
    slot: int
    subtasks: tuple[SubtaskMetrics, ...] = ()
    rss_bytes: int = 0
    sinks: tuple[SinkMetrics, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotClosed:
    """A slot has closed everything and leaves, as it was told to."""

    attempt: AttemptId
    slot: int


# --- driver to slot ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RestoredOperator:
    """One operator's state for one subtask."""

    uid: str
    keyed: tuple[StateHandle, ...] = ()
    """Of every old subtask whose key groups meet this subtask's.

    The backend takes what is its own.
    """
    lists: dict[str, tuple[bytes, ...]] = field(default_factory=dict[str, tuple[bytes, ...]])


@dataclass(frozen=True, slots=True)
class Deploy:
    """Begin: what to run, where the other slots are, and this one's state of every operator."""

    attempt: AttemptId
    data_addresses: tuple[str, ...]
    restored_checkpoint: CheckpointId
    next_checkpoint: CheckpointId
    operators: tuple[RestoredOperator, ...]
    program: bytes = field(repr=False)
    """See `program`: holds whatever secrets the user's sources and sinks hold."""

    def operator(self, uid: str) -> RestoredOperator:
        """Return the state of operator `uid`; empty when the checkpoint holds none."""
        found = (operator for operator in self.operators if operator.uid == uid)
        return next(found, RestoredOperator(uid))


@dataclass(frozen=True, slots=True)
class Trigger:
    """Sources: take part in this checkpoint now."""

    barrier: Barrier


@dataclass(frozen=True, slots=True)
class OfferSplits:
    """Splits of source `uid` that have appeared: to be read once a decision holds them."""

    uid: str
    splits: tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """The checkpoint is in the decision log: commit everything up to it."""

    checkpoint: CheckpointId
    retain_ledger_from: dict[str, CheckpointId]
    """By sink id: proofs of commits of older checkpoints may be forgotten."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The checkpoint will never complete; what was pre-committed for it stays pending."""

    checkpoint: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """All is committed: close everything, say goodbye, leave."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """The attempt is over: leave at once, roll back what is open, commit nothing more."""

    reason: str


SlotMessage: TypeAlias = (
    Hello
    | Running
    | Acked
    | Declined
    | CommittedThrough
    | SourceExhausted
    | Failed
    | Heartbeat
    | SlotClosed
)
DriverMessage: TypeAlias = (
    Deploy | Trigger | OfferSplits | Complete | Abort | Stop | Cancel | Heartbeat
)

_CLASSES: dict[str, type[Any]] = {
    message.__name__: message
    for message in (
        Hello, Running, Acked, Declined, CommittedThrough, SourceExhausted, Failed, Heartbeat,
        SlotClosed, Deploy, Trigger, OfferSplits, Complete, Abort, Stop, Cancel,
    )
}  # fmt: skip
_ENCODER = msgspec.msgpack.Encoder()
_PROSE = ("message", "trace", "reason")
"""The fields that people read and nothing is looked up by."""


def encode_message(message: SlotMessage | DriverMessage) -> bytes:
    """Return the bytes of `message`; what of its prose UTF-8 cannot spell is escaped.

    Prose may quote a user's record, which may hold half a surrogate pair. Names and paths are never
    changed.

    Raises:
        UnicodeEncodeError: A name or a path in it cannot be spelled.
    """
    name = type(message).__name__
    try:
        return _ENCODER.encode([name, message])
    except UnicodeEncodeError:
        return _ENCODER.encode([name, _escaped(message)])


def _escaped(message: SlotMessage | DriverMessage) -> SlotMessage | DriverMessage:
    prose: dict[str, Any] = {
        name: getattr(message, name).encode("utf-8", "backslashreplace").decode()
        for name in _PROSE
        if hasattr(message, name)
    }
    return replace(message, **prose)


def decode_message(data: bytes | memoryview) -> SlotMessage | DriverMessage:
    """Return the message that `data` holds.

    Raises:
        MessageCorrupt: It is no message, or one of another version.
    """
    try:
        name, fields = msgspec.msgpack.decode(data, type=tuple[str, msgspec.Raw])
        message = msgspec.msgpack.decode(fields, type=_CLASSES[name])
        return cast("SlotMessage | DriverMessage", message)
    except (msgspec.MsgspecError, KeyError) as error:
        raise MessageCorrupt(
            f"unreadable message of {len(data)} bytes on the control stream ({error}); driver and"
            " executors must run the same version of onceflow"
        ) from error
