"""The contract of sources: the description that a user builds, and the reader of one subtask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.splits import Split as Split  # noqa: PLC0414 - part of the contract
from onceflow.core.spi.dead_letters import DeadLetter

if TYPE_CHECKING:  # a slot does not pay for it
    pass


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """What a bounded reader returns once, after its last batch, and from then on for ever."""


@dataclass(frozen=True, slots=True)
class ReaderContext:
    """Where a reader runs."""

    job: str
    uid: str
    subtask: int
    parallelism: int
    attempt: AttemptId
    by_split: bool = False
    """Whether `SourceReader.rows_by_split` is asked for: the stream has watermarks."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A server that a reader waits for."""

    what: str
    """Which server, where it is, and what is wrong; without secrets."""
    lasted_s: float


class SourceReader(ABC):
    """Reads the splits of one subtask; owned by the chain's thread, except for `close`."""

    @abstractmethod
    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        """Return the next rows in the source's schema, or None when none came in `timeout_s`.

        Advances the positions past every row returned: a snapshot taken next excludes nothing that
        has been returned and includes nothing that has not.

        Raises:
            BadRecord: A record cannot be decoded and the source is told to fail on such.
            OffsetOutOfRange: Records were deleted before they were read.
            SourceUnavailable: The source did not answer within its own deadline.
        """

    @abstractmethod
    def snapshot(self) -> Sequence[Split]:
        """Return every split of this reader with its position as of the last `poll`."""

    def wake(self) -> None:  # noqa: B027 - optional hook
        """Have a `poll` that waits return None at once: its caller has something else to do.

        Called on another thread than `poll`, when a checkpoint is triggered. May come while no
        `poll` is under way, or after `close`. Without it a checkpoint waits for the `poll` to end.
        """

    def find_outage(self) -> Outage | None:
        """Return which server has not answered, and for how long; None: none is missed.

        For people: the status of the job names it while `poll` returns nothing. Called on another
        thread than `poll`, with each heartbeat. It must not wait.
        """
        return None

    def rows_by_split(self) -> Sequence[tuple[str, int]] | None:
        """Return whose rows the last `poll` returned: (split id, how many), in the order of rows.

        For watermarks, which are kept for each split: asked for where `ReaderContext.by_split` says
        so. None: all are of the reader's one split; a reader with several has to tell.
        """
        return None

    def list_ended_splits(self) -> Sequence[str]:
        """Return the ids of splits that have ended, and whose rows have all been returned.

        For watermarks: such a split holds up none of the others.
        """
        return ()

    def take_rejected(self) -> Sequence[DeadLetter]:
        """Return the bad records left out since the last call. Called after each `poll`.

        The positions have advanced past these records: a caller that drops the result loses them.
        Empty unless `Source.has_dead_letters`.
        """
        return ()

    def take_record_times(self) -> Sequence[tuple[int, int]]:
        """Return times of records: (milliseconds since 1970, how many records), in any order.

        For metrics alone: of the rows that polls have returned since the last call. Called after a
        `poll` that returned rows. A time may stand for the records around it; see
        `onceflow_commit_latency_seconds`. Empty: the source does not know.
        """
        return ()

    def add_splits(self, splits: Sequence[Split]) -> None:
        """Read `splits`, too, from where they stand; `snapshot` holds them from now on.

        Called between two `poll`s, once the decision log holds `splits`. Only a reader whose source
        has a `discovery_interval_s` is asked.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no splits while it reads")

    def commit(self, splits: Sequence[Split]) -> None:  # noqa: B027 - optional hook
        """Tell the source that everything before `splits` is done for ever.

        Called after the checkpoint that holds `splits` is in the decision log, on another thread
        than `poll`. May be skipped, repeated or late; correctness never depends on it.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; nothing is called after it. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class SplitOffsets:
    """How far a split is read, and how far it goes now, both counted in its records."""

    split_id: str
    next: int
    """The record that is read next."""
    end: int
    """The one after the last that is there, or that is to be read."""
    held_by: str = ""
    """What keeps the reader from records that are there, where that is, and what to do; for people.

    Empty if the reader may read on. Without secrets.
    """
    held_since_s: float = 0.0
    """Since when the engine has seen that, in seconds since the epoch; 0 if `held_by` is empty.

    A source leaves it out: the engine counts.
    """

    @property
    def lag(self) -> int:
        """How many records are there and not read yet."""
        return max(0, self.end - self.next)


class Source(ABC):
    """Describes a replayable source: pickled by value, holds no open resource."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The schema of every batch that readers return."""

    @property
    @abstractmethod
    def bounded(self) -> bool:
        """Whether readers ever return `EndOfInput`."""

    @property
    def has_dead_letters(self) -> bool:
        """Whether readers return bad records from `take_rejected`, which a sink must then take."""
        return False

    def validate(self) -> None:  # noqa: B027 - optional hook
        """Raise ConfigError unless the source can be read from here. Changes nothing.

        Runs on the driver before each attempt.

        Raises:
            ConfigError: It cannot; the message says what to do.
        """

    @abstractmethod
    def splits(self) -> Sequence[Split]:
        """Return every split with its resolved start position.

        Runs on the driver, once in the source's life in a job. The result goes into the decision
        log before the first record is read, so that a crash before the first checkpoint starts from
        the same place.
        """

    @property
    def discovery_interval_s(self) -> float | None:
        """How often a running job calls `discover`; None: only when an attempt starts."""
        return None

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        """Return every split that is to be read: `known`, and what has appeared since.

        Runs on the driver before each attempt, with the splits of the checkpoint that is restored,
        and while the job runs every `discovery_interval_s`, on a thread of its own, with those of
        the last checkpoint. A new split stands at its first record: nobody has read any of it. None
        is read before the decision log holds it.

        The result may hold new `Split` objects for known splits: ids and positions are compared. A
        known split may stand elsewhere or be left out where it must, with a warning: a running job
        then starts anew, and goes on from there.

        Raises:
            SourceError: What is known cannot be read on. One that is never to be retried ends a
                running job, too; any other error there is logged, and asked about again.
        """
        return known

    def latest_offsets(self, splits: Sequence[Split]) -> Sequence[SplitOffsets]:
        """Return how far each of `splits` goes now; empty where the source does not count records.

        For people and metrics: nothing is decided by it. Runs anywhere, beside a job that reads.

        Raises:
            SourceError: The source cannot be asked now.
        """
        del splits
        return ()

    def on_finished(self, splits: Sequence[Split]) -> None:  # noqa: B027 - optional hook
        """Clean up: the job is over, has read up to `splits`, and has committed all of it.

        Runs on the driver. After a drain there is more input, which the next start reads. A crash
        may skip the call.
        """

    @abstractmethod
    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        """Return a reader of `splits` (maybe none). Runs in the slot."""
