"""The contract of sources: the description that a user builds, and the reader of one subtask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.splits import Split as Split  # noqa: PLC0414 - part of the contract
from onceflow.core.spi.dead_letters import DeadLetter
from onceflow.core.spi.source_progress import SourceProgress


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """The result that a bounded reader returns after its last batch, and from then on for ever."""


@dataclass(frozen=True, slots=True)
class OutputBatch:
    """Rows of one output of a source that has several; see `Source.outputs`."""

    output: str
    """The name of the output, as in `Source.outputs`."""
    rows: pa.RecordBatch
    """The rows, in the schema of the output."""


PolledRows: TypeAlias = pa.RecordBatch | OutputBatch | tuple[OutputBatch, ...]
"""The rows of one call of `SourceReader.poll`."""


@dataclass(frozen=True, slots=True)
class ReaderContext:
    """The environment of a reader."""

    job: str
    uid: str
    subtask: int
    parallelism: int
    attempt: AttemptId
    by_split: bool = False
    """True if `SourceReader.rows_by_split` will be called, because the stream has watermarks."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A server that a reader waits for."""

    what: str
    """The server, its address, and what is wrong; without secrets."""
    lasted_s: float


class SourceReader(ABC):
    """A reader of one subtask's splits; owned by the chain's thread, except for `close`."""

    @abstractmethod
    def poll(self, timeout_s: float) -> PolledRows | EndOfInput | None:
        """Return the next rows in the source's schema, or None if none arrived in `timeout_s`.

        A reader of a source with `outputs` returns an `OutputBatch`, or several of them in the
        order in which the engine sends them on. Advances the positions past every returned row: the
        next snapshot includes exactly the rows that were returned. So a checkpoint never divides
        the rows of one call, such as those of a transaction that changed several tables.

        Raises:
            BadRecord: A record cannot be decoded and the source is set to fail on such records.
            OffsetOutOfRange: Records were deleted before they were read.
            SourceUnavailable: The source did not answer within its own deadline.
        """

    @abstractmethod
    def snapshot(self) -> Sequence[Split]:
        """Return every split of this reader with its position as of the last `poll`."""

    def wake(self) -> None:  # noqa: B027 - optional hook
        """Make a waiting `poll` return None at once, so that its caller can do other work.

        Called on another thread than `poll`, when a checkpoint is triggered. May be called while no
        `poll` is running, or after `close`. Without it, a checkpoint waits for the `poll` to end.
        """

    def find_outage(self) -> Outage | None:
        """Return the server that has not answered, and for how long; None if every server answers.

        For people: the status of the job names it while `poll` returns nothing. Called on another
        thread than `poll`, with each heartbeat. It must not wait.
        """
        return None

    def rows_by_split(self) -> Sequence[tuple[str, int]] | None:
        """Return (split id, number of rows) for the last `poll`, in the order of its rows.

        For watermarks, which are kept for each split. Called if `ReaderContext.by_split` is true.
        If the `poll` returned more than one `OutputBatch`, the numbers go on from one batch to the
        next, and a split that has rows in two batches is named for each of them.
        None means that all rows are of the reader's one split. A reader with several splits must
        return them.
        """
        return None

    def list_ended_splits(self) -> Sequence[str]:
        """Return the ids of splits that have ended, and whose rows have all been returned.

        For watermarks: such a split does not delay the others.
        """
        return ()

    def take_rejected(self) -> Sequence[DeadLetter]:
        """Return the bad records left out since the last call. Called after each `poll`.

        The positions have advanced past these records: a caller that drops the result loses them.
        Empty unless `Source.has_dead_letters`.
        """
        return ()

    def take_record_times(self) -> Sequence[tuple[int, int]]:
        """Return times of records: (milliseconds since 1970, number of records), in any order.

        Only for metrics: the times of the rows that polls have returned since the last call. Called
        after a `poll` that returned rows. A time may stand for the records around it; see
        `onceflow_commit_latency_seconds`. Empty if the source does not know the times.
        """
        return ()

    def add_splits(self, splits: Sequence[Split]) -> None:
        """Read `splits`, too, from their positions; `snapshot` includes them from now on.

        Called between two calls of `poll`, once the decision log holds `splits`. Called only if
        the source has a `discovery_interval_s`.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no splits while it reads")

    def commit(self, splits: Sequence[Split]) -> None:  # noqa: B027 - optional hook
        """Tell the source that everything before `splits` is done for good.

        Called after the checkpoint that holds `splits` is in the decision log, on another thread
        than `poll`. The call may be skipped, repeated or late; correctness never depends on it.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources; no call follows, except another `close`."""


@dataclass(frozen=True, slots=True)
class SplitOffsets:
    """The position and the current end of a split, both counted in its records."""

    split_id: str
    next: int
    """The record that is read next."""
    end: int
    """The number after the last existing record, or after the last one to read."""
    held_by: str = ""
    """The cause that keeps the reader from existing records, if there is one, and the advice; for
    people.

    Empty if the reader may read on. Without secrets.
    """
    held_since_s: float = 0.0
    """The time since which the engine has seen this cause, in seconds since the epoch; 0 if
    `held_by` is empty.

    A source leaves it out: the engine sets it.
    """

    @property
    def lag(self) -> int:
        """The number of existing records that are not read yet."""
        return max(0, self.end - self.next)


class Source(ABC):
    """A description of a replayable source: pickled by value, without open resources."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The schema of every batch that readers return.

        A source with `outputs` returns an empty schema: nothing reads it.
        """

    @property
    def outputs(self) -> Mapping[str, pa.Schema]:
        """The schema of each output stream, by name.

        Empty (the default) if the source has only the stream of `schema`. A source with outputs is
        read by `Pipeline.read_outputs`, which returns a stream for each output. All outputs have
        the same splits, so one position covers the rows of all outputs. The rows of a split keep
        their order within an output. A job may use some of the outputs, and its next version may
        use others.
        """
        return {}

    @property
    @abstractmethod
    def bounded(self) -> bool:
        """True if readers ever return `EndOfInput`."""

    @property
    def has_dead_letters(self) -> bool:
        """True if readers return bad records from `take_rejected`, which a sink must then take."""
        return False

    def bind(self, job: str, uid: str) -> Source:
        """Return the source that is read as `uid` in the job named `job`.

        `Pipeline.read` calls it once. A source that keeps something on its server, such as a
        replication slot, can name it after the job and the uid. Opens no connection.
        """
        del job, uid
        return self

    def validate(self) -> None:  # noqa: B027 - optional hook
        """Raise ConfigError unless the source can be read from here. Changes nothing.

        Runs on the driver before each attempt.

        Raises:
            ConfigError: The source cannot be read; the message says what to do.
        """

    @abstractmethod
    def splits(self) -> Sequence[Split]:
        """Return every split with its resolved start position.

        Runs on the driver, once in the source's life in a job. The result goes into the decision
        log before the first record is read. So if the job crashes before the first checkpoint, the
        next start begins at the same positions.
        """

    @property
    def discovery_interval_s(self) -> float | None:
        """The interval at which a running job calls `discover`.

        None: it is called only when an attempt starts.
        """
        return None

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        """Return every split to read: `known`, and those that have appeared since.

        Runs on the driver before each attempt, with the splits of the restored checkpoint. While
        the job runs, it runs every `discovery_interval_s`, on a thread of its own, with the splits
        of the last checkpoint. The position of a new split is its first record, because no reader
        has read it. No new split is read before the decision log holds it.

        The result may hold new `Split` objects for known splits: ids and positions are compared. If
        necessary, a known split may have another position or be left out, with a warning: a running
        job then restarts, and goes on from there.

        Raises:
            SourceError: A known split cannot be read on. An error that must never be retried ends a
                running job, too. In a running job, any other error is logged, and `discover` is
                called again.
        """
        return known

    def latest_offsets(self, splits: Sequence[Split]) -> Sequence[SplitOffsets]:
        """Return the current end of each of `splits`; empty if the source does not count records.

        For people and metrics: no decision depends on it. Runs in any process, while a job reads.

        Raises:
            SourceError: The source cannot be asked now.
        """
        del splits
        return ()

    def measure(self, splits: Sequence[Split]) -> SourceProgress | None:
        """Return the distance of `splits` from the end of the server's data; None if unknown.

        For a source whose server knows bytes and times instead of a number of records, and for
        warnings before the server gives the source up. Called as often as `latest_offsets`, on the
        same thread; no decision depends on it.

        Raises:
            SourceError: The source cannot be asked now.
        """
        del splits
        return None

    def on_finished(self, splits: Sequence[Split]) -> None:  # noqa: B027 - optional hook
        """Clean up: the job is over, has read up to `splits`, and has committed all of it.

        Runs on the driver. After a drain there is more input, which the next start reads. A crash
        may skip the call.
        """

    @abstractmethod
    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        """Return a reader of `splits`, which may be empty. Runs in the slot."""
