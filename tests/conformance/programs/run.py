"""Runs a program through all that its actions say, and checks what it has written."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.conformance.programs.attempt import Attempt, Row, graph_of, without_waiting
from tests.conformance.programs.calls import with_stepwise_calls
from tests.conformance.programs.functions import CLOCK_BEGIN_MS, CLOCK_END_MS
from tests.conformance.programs.generator import IDLE_AFTER_S, Phase, Program, program_of
from tests.conformance.programs.model import check, check_progress
from tests.conformance.programs.version import History, Version, later_version
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow import HeapBackend, RocksDBBackend
from onceflow.core.errors import StateIncompatible, UserFunctionError
from onceflow.core.plan.work import ReadFrom
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind, StateForm
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.splits import SplitState
from onceflow.core.runtime.dataflow import source_operator
from onceflow.core.runtime.dataflow.source_operator import SPLITS, decode_split, encode_split
from onceflow.core.runtime.driver import restore
from onceflow.core.state import StateBackend
from onceflow.core.state.api.context import StateClock

BACKENDS: dict[str, StateBackend] = {
    "heap": HeapBackend(),
    "rocksdb": RocksDBBackend(cache_entries=16),
}


class Clock:
    """The time on every slot's clock."""

    def __init__(self) -> None:
        self.now_ms = CLOCK_BEGIN_MS
        self.idle_s = 0.0
        """By which splits are idle."""

    def monotonic(self) -> float:
        """Return it."""
        return self.idle_s


@contextmanager
def _clock() -> Generator[Clock]:
    clock = Clock()

    def now_ms(_: StateClock) -> int:
        return clock.now_ms

    with patch.object(StateClock, "now_ms", now_ms), patch.object(source_operator, "time", clock):
        yield clock


class Run:
    """One program as it runs."""

    def __init__(self, program: Program, directory: Path, backend: str, clock: Clock) -> None:
        self._program = program
        self._directory = directory
        self._clock = clock
        self._rng = random.Random(program.seed + 1)
        self._backend = backend
        self._files = MemoryStorage()
        self._restored: CompletedCheckpoint | None = None
        self._checkpoints = 0
        self._attempts = 0
        self._history = History()
        self.rows: list[Row] = []
        self._release(Phase((), ()))
        self._attempt = self._begin()

    def run(self) -> None:
        """Do all of it, and check what comes out."""
        for number, phase in enumerate(self._program.phases, 1):
            self._release(phase)
            for action in phase.actions:
                self._step()
                self._do(action)
            if self._program.has_idle_splits:
                self._step()
                self._end_phase()
                check_progress(self._program, number, self.rows)
        self._attempt.run_until_quiet()
        self._clock.now_ms = CLOCK_END_MS
        self._attempt.run_until_quiet()
        for source in self._program.sources:
            source.end[0] = True
        self._attempt.run_until_quiet()
        self._decide(CheckpointKind.FINAL)
        self._attempt.close()
        check(self._program, self._history, self.rows)

    def _release(self, phase: Phase) -> None:
        """Let splits have the records of a phase, too."""
        readable = self._program.readable
        for side, splits in enumerate(self._program.sides):
            for split in range(len(splits)):
                readable.setdefault((side, split), 0)
        for side, split, count in phase.batches:
            readable[side, split] += count

    def _step(self) -> None:
        for _ in range(self._rng.choice([0, 10, 30, 80])):
            self._attempt.step()
        self._clock.now_ms += self._rng.choice([0, 10, 100, 1000])

    def _end_phase(self) -> None:
        """Have all splits be read, then be idle, and a checkpoint hold that event time."""
        self._attempt.run_until_quiet()
        self._clock.idle_s += IDLE_AFTER_S
        self._attempt.run_until_quiet()
        self._decide(CheckpointKind.PERIODIC)

    def _do(self, action: str) -> None:
        match action:
            case "checkpoint":
                self._decide(CheckpointKind.PERIODIC)
            case "kill":
                self._restart()
            case "stop":
                self._decide(CheckpointKind.STOP)
                self._restart()
            case "savepoint":
                self._move(self._decide(CheckpointKind.SAVEPOINT, StateForm.CANONICAL))
            case "abort" | "abort and kill":
                self._checkpoints += 1
                self._attempt.give_up_checkpoint(
                    self._checkpoints,
                    self._rng.choice([0, 5, 20]),
                    overtakes=self._program.overtakes,
                )
                if action == "abort and kill":
                    self._restart()
            case _:
                savepoint = self._decide(CheckpointKind.SAVEPOINT_STOP, StateForm.CANONICAL)
                # What the clock brings meanwhile is not in the savepoint.
                self._clock.now_ms += 200
                for _ in range(20):
                    self._attempt.step()
                self._decide(CheckpointKind.STOP)
                self._move(savepoint)

    def _move(self, savepoint: CompletedCheckpoint) -> None:
        """Begin again from a savepoint with either backend."""
        self._restored = savepoint
        self._backend = self._rng.choice(sorted(BACKENDS))
        self._restart()

    def _restart(self) -> None:
        self._attempt.close()
        self._attempt = self._begin()

    def _begin(self) -> Attempt:
        if self._restored is not None:
            self._check_changes_are_refused(self._restored)
            self._change_pipeline(self._restored)
        self._attempts += 1
        graph = graph_of(self._program.pipeline(self._history.last))
        if self._restored is not None:
            restore.check_operators(graph, self._restored)
            restore.check_settings(graph, self._restored)
            restore.check_in_flight(graph, self._restored)
        splits = {
            operator.uid: tuple(
                encode_split(SplitState(split)) for split in operator.work.source.splits()
            )
            for operator in graph.operators
            if isinstance(operator.work, ReadFrom)
        }
        attempt = Attempt(
            graph, BACKENDS[self._backend], self._rng.randint(1, 3), self._directory, self._files,
            self._rng, number=self._attempts, restored=self._restored, splits=splits,
            allow_non_restored_state=self._program.kind == "running",
        )  # fmt: skip
        if self._restored is not None and self._rng.random() < 0.5:
            # Records come before event time is told again.
            attempt.read_some()
        attempt.tell_idle()
        return attempt

    def _check_changes_are_refused(self, restored: CompletedCheckpoint) -> None:
        """Raise AssertionError unless a program that would misread the state is refused."""
        changed = self._program.changed()
        if changed is None or not any(one.keyed for _, one in restored.operator("work")):
            return
        graph = graph_of(changed.pipeline(Version()))
        with suppress(StateIncompatible):
            restore.check_settings(graph, restored)
            raise AssertionError(f"{changed.kind} by {changed.key[0]}, {changed.size_ms} ms begins")

    def _change_pipeline(self, restored: CompletedCheckpoint) -> None:
        """Write the pipeline another way, where the restored state may go on in it."""
        if self._program.kind == "result" or self._rng.random() < 0.4:
            return
        if any(snapshot.in_flight for snapshot in restored.snapshots):
            return
        if self._program.has_calls:
            # Records in flight have the columns of the version that has read them.
            return
        may_rename = self._program.kind == "running"
        version = later_version(self._rng, self._history.last, may_rename_total=may_rename)
        processed: list[int] = []
        for side, splits in enumerate(self._program.sides):
            for _, snapshot in restored.operator(f"records-{side}"):
                for element in snapshot.lists[SPLITS]:
                    split = decode_split(element).split
                    for batch in splits[int(split.id)][: int(split.position)]:
                        processed += [record["id"] for record in batch]
        self._history.begin(version, processed)

    def _decide(
        self, kind: CheckpointKind, form: StateForm = StateForm.NATIVE
    ) -> CompletedCheckpoint:
        self._checkpoints += 1
        overtakes = self._program.overtakes and kind is CheckpointKind.PERIODIC
        completed, rows = self._attempt.checkpoint(
            self._checkpoints, kind, form, overtakes=overtakes
        )
        self._attempt.complete(completed)
        self._restored = completed
        for written in rows.values():
            self.rows += map(_as_first_named, written)
        return completed


def _as_first_named(row: Row) -> Row:
    """Return a row with its columns named as the first version has them."""
    return {"key" if name == "clef" else name.rstrip("_"): value for name, value in row.items()}


def run_seed(seed: int, directory: Path, backend: str) -> None:
    """Run the program of a seed, on a backend at first.

    Raises:
        AssertionError: What came out is not what must; names the seed.
    """
    program = program_of(seed)
    run_program(program, directory, backend)


def run_program(program: Program, directory: Path, backend: str) -> None:
    """Run a program."""
    with without_waiting(), with_stepwise_calls(), _clock() as clock:
        try:
            Run(program, directory, backend, clock).run()
        except UserFunctionError as error:
            if program.kind != "result" or "'made'" not in str(error):
                error.add_note(f"seed {program.seed} on {backend}: {_told(program)}")
                raise
        except Exception as error:
            error.add_note(f"seed {program.seed} on {backend}: {_told(program)}")
            raise


def _told(program: Program) -> str:
    told: dict[str, Any] = {
        "kind": program.kind, "key": str(program.key[0]), "extra": str(program.extra[0]),
        "phases": program.phases, "how": program.how, "lateness": program.lateness_ms,
        "sizes": (program.size_ms, program.slide_ms),
        "idle": program.has_idle_splits, "overtakes": program.overtakes,
        "second stage": program.has_second_stage, "ends alone": program.ends_alone,
        "splits": [len(side) for side in program.sides],
    }  # fmt: skip
    return str(told)
