"""Running aggregates that expire in a job whose slots are killed, by a clock that the test sets."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.test_recovery import BACKENDS
from tests.runtime.test_union import begin
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource, amount_of
from tests.support.directory_sink import DirectorySink
from tests.support.held_up import await_checkpoint, kill_a_slot
from tests.support.waiting import await_status

from onceflow import JobState, StateBackend, StateTtlConfig, count, sum_
from onceflow.core.spi import EndOfInput, PolledRows, ReaderContext, SourceReader, Split
from onceflow.core.state.api.context import StateClock

ACCOUNTS, RECORDS = 20, 400
"""Of each phase; the clock stands still in it."""
START_MS, TTL_S = 1_700_000_000_000, 10
PHASES_MS = (0, 9_999, 19_999)
"""What the clock says. Each key is used in each phase: it lives into the second, not the third."""
PHASE_OF_BIRTH = (0, 0, 2)


@dataclass(frozen=True)
class PhasedSource(CountingSource):
    """Holds records back until their phase; where it is unpickled, it sets the clock of states."""

    clock: str = ""
    """A file with the phases that have begun, and the time."""
    driver: int = 0
    """The process whose clock is left alone."""

    def __reduce__(self) -> Any:
        return _unpickled, ({field.name: getattr(self, field.name) for field in fields(self)},)

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        return _PhasedReader(self, super().reader(splits, context))


class _PhasedReader(SourceReader):
    def __init__(self, source: PhasedSource, reader: SourceReader) -> None:
        self._source = source
        self._reader = reader

    def poll(self, timeout_s: float) -> PolledRows | EndOfInput | None:
        begun = said(self._source.clock)[0]
        limit = begun * RECORDS // self._source.splits_count
        (split,) = self._reader.snapshot()
        if int(split.position) >= limit and begun < len(PHASES_MS):
            time.sleep(timeout_s)
            return None
        return self._reader.poll(timeout_s)

    def snapshot(self) -> Sequence[Split]:
        return self._reader.snapshot()

    def close(self) -> None:
        self._reader.close()


def _unpickled(given: dict[str, Any]) -> PhasedSource:
    source = PhasedSource(**given)
    if os.getpid() != source.driver:
        StateClock.now_ms = lambda _: said(source.clock)[1]  # type: ignore[assignment, method-assign]
    return source


def said(clock: str) -> tuple[int, int]:
    """Return how many phases have begun, and the time."""
    begun, now_ms = Path(clock).read_text().split()
    return int(begun), int(now_ms)


def say(clock: Path, phase: int) -> None:
    """Have a phase begin, with its time: both at once."""
    new = clock.with_suffix(".new")
    new.write_text(f"{phase + 1} {START_MS + PHASES_MS[phase]}")
    new.replace(clock)


def expected() -> dict[int, tuple[int, int]]:
    """Return balance and number by id: of all records of the account since its birth."""
    found: dict[int, tuple[int, int]] = {}
    totals = defaultdict[tuple[int, int], int](int)
    numbers: Counter[tuple[int, int]] = Counter()
    for record in range(RECORDS * len(PHASES_MS)):
        life = PHASE_OF_BIRTH[record // RECORDS], record % ACCOUNTS
        totals[life] += amount_of(record)
        numbers[life] += 1
        found[record] = totals[life], numbers[life]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.servers
def test_keys_expire_by_the_time_of_their_last_use_through_kills(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    clock, ends = tmp_path / "clock", tmp_path / "ends"
    source = PhasedSource(
        RECORDS * len(PHASES_MS),
        accounts=ACCOUNTS,
        batch_rows=20,
        pause_s=0.05,
        ends_with=str(ends),
        clock=str(clock),
        driver=os.getpid(),
    )
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = begin(cluster, tmp_path, backend=backend)
    records = pipeline.read(source, uid="records").key_by("account")
    ttl = StateTtlConfig(TTL_S)
    totals = records.running(balance=sum_("amount"), n=count(), ttl=ttl, uid="totals")
    totals.write(sink, uid="out")
    say(clock, 0)
    job = pipeline.start()
    await_checkpoint(job)
    await_status(job, lambda s: len(sink.rows()) >= RECORDS)
    # Restored with what was used in the first phase, which lives a millisecond longer.
    kill_a_slot(job, 0)
    say(clock, 1)
    await_status(job, lambda s: len(sink.rows()) >= 2 * RECORDS)
    # All of it has expired; what has begun anew goes on through a restore.
    say(clock, 2)
    await_status(job, lambda s: len(sink.rows()) > 2 * RECORDS)
    kill_a_slot(job, 1)
    ends.touch()
    assert job.wait(120).state is JobState.FINISHED
    rows = sink.rows()
    assert Counter(row["id"] for row in rows) == Counter(range(RECORDS * len(PHASES_MS)))
    assert {row["id"]: (row["balance"], row["n"]) for row in rows} == expected()
