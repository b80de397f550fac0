"""The harness of a source's clause: its readers, and the checks of the rows that they return."""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from typing_extensions import assert_never

from onceflow.core.errors import OnceflowError
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import (
    EndOfInput,
    OutputBatch,
    PolledRows,
    ReaderContext,
    Source,
    SourceReader,
    Split,
)
from onceflow.integration.conformance.harness import PATIENCE_S, Effort
from onceflow.integration.conformance.processes import TIMEOUT_S, Processes
from onceflow.integration.conformance.source_input import SourceInput
from onceflow.integration.conformance.target import NotTestable, Violation, expect

SOURCE_UID = "source"
ROWS_A_SPLIT = 12
POLL_S = 0.05
"""The `timeout_s` of polls."""
QUIET_S = 0.1
"""The time for which a reader of a source without an end must return nothing more."""
PROMPT_S = 2.0
"""The longest delay of a call that must return at once. A loaded machine needs some of it."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ReaderSnapshot:
    """A reader's snapshot, and the number of rows of each split returned until then."""

    splits: tuple[Split, ...]
    returned: Mapping[str, int]
    keys: frozenset[object]
    """The keys of the rows returned until then."""

    def __str__(self) -> str:
        counts = ", ".join(f"{count} of {split}" for split, count in self.returned.items())
        return f"the snapshot after {counts or 'no rows'}"


class Reading:
    """A reader and the keys of the rows that it has returned. One thread."""

    def __init__(self, harness: SourceHarness, reader: SourceReader) -> None:
        self._harness = harness
        self.reader = reader
        self.keys: list[object] = []
        """The keys in the order in which the reader returned their rows."""
        self.has_ended = False
        self.batch_sizes: Sequence[int] = ()
        """The number of rows of each batch of the last poll; several if a source has outputs."""

    def poll(self, timeout_s: float = POLL_S) -> Sequence[object]:
        """Poll once. Return the keys of the returned rows; empty if there were none."""
        result = self.reader.poll(timeout_s)
        self.reader.take_rejected()
        self.has_ended = isinstance(result, EndOfInput)
        if result is None or isinstance(result, EndOfInput):
            return ()
        self._harness.expect_schema(result)
        self.batch_sizes = [batch.num_rows for batch in _list_batches(result)]
        keys = self._harness.list_keys(result)
        self.keys += keys
        return keys

    def read(self, count: int) -> None:
        """Poll until the reader has returned `count` rows in all, or ends, or for `patience_s`."""
        deadline = time.monotonic() + self._harness.patience_s
        while len(self.keys) < count and not self.has_ended and time.monotonic() < deadline:
            self.poll()

    def read_all(self, count: int) -> None:
        """Read `count` rows, and then up to the end of the input, or for `QUIET_S` without one."""
        self.read(count)
        harness = self._harness
        quiet_until = time.monotonic() + (harness.patience_s if harness.source.bounded else QUIET_S)
        while not self.has_ended and time.monotonic() < quiet_until:
            self.poll()

    def count_returned(self) -> dict[str, int]:
        """Return the number of returned rows of each split."""
        return dict(Counter(self._harness.find_split(key) for key in self.keys))

    def snapshot(self) -> ReaderSnapshot:
        """Return the reader's snapshot, pickled and unpickled like one from the decision log."""
        splits = pickle.loads(pickle.dumps(tuple(self.reader.snapshot())))  # noqa: S301 - our own
        return ReaderSnapshot(splits, self.count_returned(), frozenset(self.keys))


class SourceHarness:
    """The input, the readers and the randomness of one clause. One thread."""

    def __init__(
        self,
        source_input: SourceInput,
        processes: Processes,
        directory: Path,
        effort: Effort,
        clause: str,
    ) -> None:
        self.input = source_input
        self.processes = processes
        self.directory = directory
        self.effort = effort
        self.random = random.Random(f"{effort.seed} {clause}")  # noqa: S311 - of a schedule
        self.patience_s = PATIENCE_S
        """The time for which a reader may return no rows although its splits have some."""
        self.rows: dict[str, list[object]] = {}
        """The keys of the input's rows by split, in order."""
        self._split_ids: dict[object, str] = {}
        self._readings: list[Reading] = []

    # --- the input ------------------------------------------------------------------------------

    def fill(self, rows: int = ROWS_A_SPLIT) -> Sequence[Split]:
        """Fill the input, and return the start positions of the source's splits."""
        for split_id, keys in self.input.fill(rows).items():
            self.add_rows(split_id, keys)
        expect(self.rows, "fill() of the input returned no split")
        self.source = self.pickle_source(self.input.source())
        return self.source.splits()

    def fill_bounded(self, rows: int = ROWS_A_SPLIT) -> Sequence[Split]:
        """Fill the input like `fill`, for a source with an end.

        Raises:
            NotTestable: The source has no end, and the input has no `source_with_end`.
        """
        splits = self.fill_with_end_if_possible(rows)
        if not self.source.bounded:
            raise NotTestable("needs source_with_end()")
        return splits

    def fill_with_end_if_possible(self, rows: int) -> Sequence[Split]:
        """Fill the input, for a source with an end if the author provides one."""
        splits = self.fill(rows)
        if self.source.bounded:
            return splits
        with suppress(NotTestable):
            self.source = self.pickle_source(self.input.source_with_end())
            expect(
                self.source.bounded, "source_with_end() returned a source whose `bounded` is false"
            )
        return self.source.splits()

    def fill_endless(self) -> Sequence[Split]:
        """Fill the input like `fill`, for a source without an end.

        Raises:
            NotTestable: The source has an end.
        """
        splits = self.fill()
        if self.source.bounded:
            raise NotTestable("the source has an end, so its readers do not wait for rows")
        return splits

    def add_rows(self, split_id: str, keys: Sequence[object]) -> None:
        """Add rows that are now at the end of a split of the input."""
        for key in keys:
            expect(
                key not in self._split_ids,
                f"the input has the key {key!r} twice: return different keys",
            )
            self._split_ids[key] = split_id
        self.rows.setdefault(split_id, []).extend(keys)

    def pickle_source(self, source: Source) -> Source:
        """Return `source` as a slot gets it.

        Raises:
            Violation: The source does not pickle.
        """
        try:
            copy: Source = pickle.loads(pickle.dumps(source))  # noqa: S301 - pickled here
        # Pickling fails with TypeError, AttributeError or PicklingError.
        except Exception as error:
            raise Violation(
                f"the source goes to other processes, and does not pickle: {error}. Keep only"
                " settings in it, in a class of a module; open the resources in reader()"
            ) from error
        return copy

    def list_keys(self, rows: PolledRows) -> Sequence[object]:
        """Return the keys of rows: pairs (output, key) if the source has outputs."""
        if isinstance(rows, pa.RecordBatch):
            return self.input.keys(rows)
        batches = (rows,) if isinstance(rows, OutputBatch) else rows
        return [(batch.output, key) for batch in batches for key in self.input.keys(batch.rows)]

    def expect_schema(self, rows: PolledRows) -> None:
        """Raise Violation if the rows of a poll have another type, output or schema."""
        outputs = self.source.outputs
        expect(
            isinstance(rows, (pa.RecordBatch, OutputBatch))
            or (type(rows) is tuple and all(type(batch) is OutputBatch for batch in rows)),
            f"poll returned {type(rows).__name__}: return a RecordBatch, an OutputBatch, a tuple of"
            " OutputBatch, EndOfInput() or None",
        )
        if isinstance(rows, pa.RecordBatch):
            expect(
                not outputs,
                f"poll returned a RecordBatch, and the source has the outputs {', '.join(outputs)}:"
                " return an OutputBatch",
            )
            _expect_schema(rows, self.source.schema, "the source's schema")
            return
        for batch in (rows,) if isinstance(rows, OutputBatch) else rows:
            expect(
                batch.output in outputs,
                f"poll returned rows of the output {batch.output!r}, and the source has the outputs"
                f" {', '.join(outputs) or 'none'}",
            )
            _expect_schema(
                batch.rows, outputs[batch.output], f"the schema of output {batch.output!r}"
            )

    def find_split(self, key: object) -> str:
        """Return the id of the split that has the row with this key.

        Raises:
            Violation: The input has no such row.
        """
        split_id = self._split_ids.get(key)
        if split_id is None:
            raise Violation(f"a reader returned a row with the key {key!r}, which the input lacks")
        return split_id

    def count_rows(self, split_ids: Sequence[str] | None = None) -> int:
        """Return the number of rows in the given splits, or in all splits."""
        chosen = self.rows if split_ids is None else split_ids
        return sum(len(self.rows[split_id]) for split_id in chosen)

    # --- reading --------------------------------------------------------------------------------

    def open(
        self,
        splits: Sequence[Split],
        *,
        subtask: int = 0,
        parallelism: int = 1,
        attempt: int = 1,
        by_split: bool = False,
    ) -> Reading:
        """Return a reading of a new reader. `clean_up` closes the reader."""
        context = ReaderContext(
            job="conformance",
            uid=SOURCE_UID,
            subtask=subtask,
            parallelism=parallelism,
            attempt=AttemptId(attempt),
            by_split=by_split,
        )
        reading = Reading(self, self.source.reader(splits, context))
        self._readings.append(reading)
        return reading

    def read_rest(self, snapshot: ReaderSnapshot) -> list[object]:
        """Return the keys of the rows that a new reader returns from `snapshot` on."""
        reading = self.open(snapshot.splits)
        split_ids = [split.id for split in snapshot.splits]
        reading.read_all(self.count_rows(split_ids) - sum(snapshot.returned.values()))
        reading.reader.close()
        return reading.keys

    def list_rest(self, snapshot: ReaderSnapshot) -> dict[str, list[object]]:
        """Return the keys of the rows that follow `snapshot`, by split."""
        if self.source.outputs:
            # The rows of one output may come earlier than those of another.
            return {
                split.id: [key for key in self.rows[split.id] if key not in snapshot.keys]
                for split in snapshot.splits
            }
        return {
            split.id: self.rows[split.id][snapshot.returned.get(split.id, 0) :]
            for split in snapshot.splits
        }

    def collect_snapshots(self, splits: Sequence[Split]) -> list[ReaderSnapshot]:
        """Read all rows, and return the snapshots before the first poll and after every batch.

        Raises:
            Violation: Rows are missing.
            NotTestable: All rows came in one batch.
        """
        reading = self.open(splits)
        snapshots = [reading.snapshot()]
        deadline = time.monotonic() + self.patience_s
        while len(reading.keys) < self.count_rows() and time.monotonic() < deadline:
            if reading.poll():
                snapshots.append(reading.snapshot())
            elif reading.has_ended:
                break
        reading.reader.close()
        self.expect_none_missing(reading.keys, self.rows, "a reader of all splits")
        if len(snapshots) < 3:
            raise NotTestable(
                f"a reader returned all {len(reading.keys)} rows in one batch: give the source"
                " a smaller batch size"
            )
        return snapshots

    def sample(self, snapshots: Sequence[ReaderSnapshot]) -> list[ReaderSnapshot]:
        """Return the first and last of `snapshots`, and as many others as there are rounds."""
        others = list(snapshots[1:-1])
        count = min(len(others), self.effort.rounds)
        return [snapshots[0], *self.random.sample(others, count), snapshots[-1]]

    # --- checking -------------------------------------------------------------------------------

    def expect_rows(
        self, keys: Sequence[object], rows: Mapping[str, Sequence[object]], when: str
    ) -> None:
        """Raise Violation if `keys` are not exactly `rows`, each once and in order by split.

        Raises:
            Violation: Rows are missing, returned twice, unexpected, or in another order.
        """
        self.expect_none_missing(keys, rows, when)
        by_split: dict[str, list[object]] = {split_id: [] for split_id in rows}
        for key in keys:
            by_split.setdefault(self.find_split(key), []).append(key)
        for split_id, returned in by_split.items():
            expected = list(rows.get(split_id, ()))
            extra = list((Counter(returned) - Counter(expected)).elements())
            expect(not extra, f"{when}: {_some(extra)} of {split_id} returned again")
            for of_output, expected_of_output in zip(
                self._divide_by_output(returned), self._divide_by_output(expected), strict=True
            ):
                expect(
                    of_output == expected_of_output,
                    f"{when}: the rows of {split_id} came in the order {of_output}, and should come"
                    f" in the order {expected_of_output}",
                )

    def _divide_by_output(self, keys: Sequence[Any]) -> list[list[object]]:
        """Return the keys of each output; all keys if the source has no outputs."""
        outputs = self.source.outputs
        if not outputs:
            return [list(keys)]
        return [[key for key in keys if key[0] == output] for output in outputs]

    def expect_none_missing(
        self, keys: Sequence[object], rows: Mapping[str, Sequence[object]], when: str
    ) -> None:
        """Raise Violation if one of `rows` is not among `keys`."""
        returned = set(keys)
        for split_id, expected in rows.items():
            missing = [key for key in expected if key not in returned]
            expect(not missing, f"{when}: {_some(missing)} of {split_id} not returned")

    def clean_up(self) -> None:
        """Close every reader."""
        self.processes.disarm()
        for reading in self._readings:
            # Ignore errors: the clause has made its checks before.
            with suppress(OnceflowError, OSError):
                reading.reader.close()


def count_rows(rows: PolledRows) -> int:
    """Return the number of rows of a poll."""
    return sum(batch.num_rows for batch in _list_batches(rows))


def _list_batches(rows: PolledRows) -> list[pa.RecordBatch]:
    match rows:
        case pa.RecordBatch():
            return [rows]
        case OutputBatch():
            return [rows.rows]
        case tuple():
            return [batch.rows for batch in rows]
        case _:
            assert_never(rows)


class Call:
    """A call of a reader's method in a thread of its own."""

    def __init__(self, method: str, function: Callable[[], Any]) -> None:
        self._method = method
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error

    def is_running(self, timeout_s: float) -> bool:
        """Wait for the end of the call. Return True if it still runs after `timeout_s`."""
        self._thread.join(timeout_s)
        return self._thread.is_alive()

    def result(self) -> Any:
        """Return the call's result, or raise its error.

        Raises:
            Violation: The call still runs after `TIMEOUT_S`.
        """
        expect(
            not self.is_running(TIMEOUT_S),
            f"{self._method} did not return in {TIMEOUT_S:g} s",
        )
        if self._error is not None:
            raise self._error
        return self._result


def measure(call: Callable[[], _T]) -> tuple[_T, float]:
    """Return the result of `call` and the seconds that it took."""
    began = time.monotonic()
    result = call()
    return result, time.monotonic() - began


def _expect_schema(rows: pa.RecordBatch, schema: pa.Schema, name: str) -> None:
    expect(
        rows.schema.equals(schema),
        f"poll returned rows of the schema\n{rows.schema}\nand {name} is\n{schema}",
    )


def _some(keys: Sequence[object]) -> str:
    shown = ", ".join(map(repr, keys[:5]))
    return f"{len(keys)} rows ({shown}{', …' * (len(keys) > 5)})"
