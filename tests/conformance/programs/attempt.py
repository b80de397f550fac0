"""One attempt of a job in this process and on one thread: real subtasks, stepped one at a time.

The chain builder, operators, state backends, channels, alignment and the assignment of state at a
restore are the engine's own. What is not: the driver and its log (a checkpoint counts as decided
when each subtask has taken its part), threads (a seeded choice says which subtask steps next), and
sinks, whose rows count once a decided checkpoint holds them.
"""

# The parts of a slot are stepped by hand, which nobody else may do.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow import Checkpointing, LocalProcesses, Pipeline, RuntimeSettings
from onceflow.core.plan.graph import Chain, Edge, Exchange, Graph, Operator
from onceflow.core.plan.work import WriteTo
from onceflow.core.protocol.checkpoints.decisions import (
    Barrier,
    CheckpointKind,
    NotifyAbort,
    StateForm,
)
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    InFlight,
    OperatorSnapshot,
    SubtaskSnapshot,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import Complete, Deploy, PartFailed
from onceflow.core.protocol.splits import key_group_range
from onceflow.core.runtime.dataflow import channels
from onceflow.core.runtime.dataflow import subtask as subtask_module
from onceflow.core.runtime.dataflow.operators import PendingSnapshot, RunningOperator
from onceflow.core.runtime.dataflow.subtask import (
    ReceivingSubtask,
    SnapshotTaken,
    SourceSubtask,
    Subtask,
    SubtaskReport,
)
from onceflow.core.runtime.driver.restore import assign_state
from onceflow.core.runtime.slot.chain_builder import ChainBuilder
from onceflow.core.settings.pipeline_settings import Delivery
from onceflow.core.state import StateBackend
from onceflow.core.traces import NO_TRACE, Trace

MAX_PARALLELISM = 16
STEPS_MAX = 20_000
"""More than any program needs: one that goes on for so long hangs."""
Row = dict[str, Any]


@dataclass(frozen=True)
class _Plan:
    """The part of an attempt's plan that the chain builder reads."""

    parallelism: int
    attempt: AttemptId
    job: str = "program"
    max_parallelism: int = MAX_PARALLELISM
    delivery: Delivery = Delivery.EXACTLY_ONCE
    settings: RuntimeSettings = field(
        default_factory=lambda: RuntimeSettings(poll_timeout_s=0.001, channel_batches=2)
    )
    allow_non_restored_state: bool = False


class _Storage:
    def __init__(self, files: MemoryStorage) -> None:
        self._files = files

    def reader(self) -> MemoryStorage:
        return self._files


@dataclass(frozen=True)
class _Scratch:
    path: Path


@dataclass(frozen=True)
class _Context:
    """The part of a slot's context that the chain builder reads."""

    plan: _Plan
    slot: int
    storage: _Storage
    scratch: _Scratch
    post: Callable[[SubtaskReport], None]
    trace: Trace = NO_TRACE
    closing: threading.Event = field(default_factory=threading.Event)

    def beside(self, work: Callable[[], None]) -> None:
        """Do at once what a slot does on another thread."""
        work()


class CollectingSink(RunningOperator):
    """Keeps rows by the checkpoint that they belong to."""

    def __init__(self, uid: str) -> None:
        super().__init__(uid)
        self._rows: list[Row] = []
        self.taken: dict[int, list[Row]] = {}

    def process(self, batch: channels.Batch) -> None:
        """Keep rows for the next checkpoint."""
        self._rows += batch.rows.to_pylist()

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Write the rows so far into `checkpoint`."""
        self.taken[int(checkpoint)] = self._rows
        self._rows = []
        return PendingSnapshot(self.uid, lambda _: OperatorSnapshot(self.uid))


class _Builder(ChainBuilder):
    """Builds one slot's subtasks, connected with those of the other slots of this process."""

    def __init__(self, context: _Context, graph: Graph, backend: StateBackend, deploy: Any) -> None:
        program = cast("Any", _Program(graph, backend))
        with patch("onceflow.core.runtime.slot.chain_builder.SlotCommits"):
            super().__init__(cast("Any", context), program, deploy)
        self.others: Sequence[_Builder] = ()
        self.sinks: dict[str, CollectingSink] = {}

    def _make_channels(self, chain: Chain, edge: Edge, first: int) -> list[channels.OutputChannel]:
        me = self._context.slot
        if edge.exchange is Exchange.FORWARD:
            return [channels.LocalChannel(self.gates[chain.id], first)]
        return [channels.LocalChannel(one.gates[chain.id], first + me) for one in self.others]

    def _operator(self, operator: Operator, ref: SubtaskRef) -> RunningOperator:
        if not isinstance(operator.work, WriteTo):
            return super()._operator(operator, ref)
        self.sinks[operator.uid] = CollectingSink(operator.uid)
        return self.sinks[operator.uid]


@dataclass(frozen=True)
class _Program:
    graph: Graph
    backend: StateBackend


@contextmanager
def without_waiting() -> Generator[None]:
    """Have subtasks tell event time at every step, and never wait."""
    with (
        patch.object(subtask_module, "WATERMARK_INTERVAL_S", 0.0),
        patch.object(subtask_module, "WAIT_S", 0.0),
    ):
        yield


class Attempt:
    """Subtasks of a job side by side, from a restored checkpoint or from the beginning."""

    def __init__(
        self,
        graph: Graph,
        backend: StateBackend,
        parallelism: int,
        scratch: Path,
        files: MemoryStorage,
        rng: random.Random,
        *,
        number: int,
        restored: CompletedCheckpoint | None,
        splits: Mapping[str, tuple[bytes, ...]],
        allow_non_restored_state: bool = False,
    ) -> None:
        self._rng = rng
        self._files = files
        self._number = number
        self.parallelism = parallelism
        self.exhausted = 0
        self._reports: list[SubtaskReport] = []
        begin = restored or _beginning(parallelism, splits)
        slots = assign_state(graph, begin, parallelism)
        plan = _Plan(
            parallelism,
            AttemptId(number),
            allow_non_restored_state=allow_non_restored_state,
        )
        self._builders: list[_Builder] = []
        for index in range(parallelism):
            where = scratch / f"{number}-{index}"
            where.mkdir(parents=True)
            context = _Context(plan, index, _Storage(files), _Scratch(where), self._reports.append)
            deploy = Deploy(
                (), begin.checkpoint, CheckpointId(int(begin.checkpoint) + 1),
                slots[index].operators, slots[index].in_flight, b"",
            )  # fmt: skip
            # Each slot has functions of its own, as if they had been sent to it.
            mine = copy.deepcopy(graph)
            self._builders.append(_Builder(context, mine, backend, deploy))
        for builder in self._builders:
            builder.others = self._builders
        self._subtasks: list[Subtask] = []
        for builder in self._builders:
            self._subtasks += builder.build().subtasks

    def read_some(self) -> None:
        """Let the sources read and what they read come through, before others say they are idle."""
        for subtask in self._subtasks:
            if isinstance(subtask, SourceSubtask) and subtask._source.reader.snapshot():
                subtask._step()
                subtask._flush()
        receiving = [
            subtask for subtask in self._subtasks if not isinstance(subtask, SourceSubtask)
        ]
        for _ in range(STEPS_MAX):
            waiting = [one for one in receiving if one.gate.waiting() or not one._flush()]
            if not waiting:
                break
            for subtask in receiving:
                subtask._step()
        self._raise_failures()

    def tell_idle(self) -> None:
        """Let the sources without a split say so everywhere, before a row is read.

        Which records are late is then a matter of the rows alone.
        """
        idle = [
            subtask
            for subtask in self._subtasks
            if isinstance(subtask, SourceSubtask) and not subtask._source.reader.snapshot()
        ]
        receiving = [
            subtask for subtask in self._subtasks if not isinstance(subtask, SourceSubtask)
        ]
        for _ in range(8 + 8 * self.parallelism):
            for subtask in (*idle, *receiving):
                subtask._step()
        self._raise_failures()

    def step(self) -> None:
        """Let one subtask do one thing."""
        subtask = self._rng.choice(self._subtasks)
        subtask._step()
        self._raise_failures()

    def checkpoint(
        self,
        number: int,
        kind: CheckpointKind,
        form: StateForm = StateForm.NATIVE,
        *,
        overtakes: bool = False,
    ) -> tuple[CompletedCheckpoint, dict[str, list[Row]]]:
        """Return a checkpoint that every subtask has taken, and by sink the rows that it decides.

        The stream goes on meanwhile.
        """
        self._trigger(number, kind, form, overtakes=overtakes)
        taken: dict[SubtaskRef, SnapshotTaken] = {}
        for _ in range(STEPS_MAX):
            self.step()
            for report in self._take_reports():
                if isinstance(report, SnapshotTaken):
                    taken[report.subtask] = report
            if len(taken) == len(self._subtasks):
                break
        else:
            raise AssertionError(f"checkpoint {number} is never taken by all subtasks")
        snapshots = tuple(
            SubtaskSnapshot(
                ref,
                tuple(one.upload(self._files) for one in report.pending),
                in_flight=self._persist_overtaken(report),
            )
            for ref, report in sorted(taken.items(), key=lambda item: str(item[0]))
        )
        completed = CompletedCheckpoint(
            CheckpointId(number), AttemptId(self._number), self.parallelism, MAX_PARALLELISM,
            snapshots, 0, 0,
        )  # fmt: skip
        rows: dict[str, list[Row]] = {}
        for builder in self._builders:
            for uid, sink in builder.sinks.items():
                for one in sorted(sink.taken):
                    rows.setdefault(uid, []).extend(sink.taken.pop(one))
        return completed, rows

    def give_up_checkpoint(self, number: int, steps: int, *, overtakes: bool) -> None:
        """Take a part of a periodic checkpoint that is aborted then."""
        self._trigger(number, CheckpointKind.PERIODIC, StateForm.NATIVE, overtakes=overtakes)
        for _ in range(steps):
            self.step()
        for report in self._take_reports():
            if isinstance(report, SnapshotTaken):
                self._abandon(report)
        for subtask in self._subtasks:
            subtask.post(NotifyAbort(CheckpointId(number), "given up"))
        self._settle_mail()

    def _abandon(self, report: SnapshotTaken) -> None:
        """Abandon what a subtask has taken, uploaded already or not."""
        for pending in report.pending:
            if self._rng.random() < 0.5:
                pending.upload(self._files)
            else:
                pending.discard()

    def _trigger(
        self, number: int, kind: CheckpointKind, form: StateForm, *, overtakes: bool
    ) -> None:
        for subtask in self._subtasks:
            if isinstance(subtask, SourceSubtask) and subtask._reading:
                # What was read is told before the barrier, so that the same records are late
                # whether there is a restore behind it or not.
                subtask._advance(subtask._source.next_watermark)
        after_s = 0.0 if overtakes else None
        trigger = Barrier(CheckpointId(number), kind, 0, after_s, form)
        for subtask in self._subtasks:
            if isinstance(subtask, SourceSubtask):
                subtask.post(trigger)

    def _persist_overtaken(self, report: SnapshotTaken) -> tuple[InFlight, ...]:
        own = key_group_range(MAX_PARALLELISM, self.parallelism, report.subtask.index)
        persisted: list[InFlight] = []
        for one in report.overtaken:
            groups = own if one.sent else range(MAX_PARALLELISM)
            data = channels.encode_batches(one.batches)
            handle = self._files.write(f"in-flight-{one.chain}", data, key_groups=groups)
            persisted.append(InFlight(one.chain, one.sent, handle, one.input))
        return tuple(persisted)

    def complete(self, checkpoint: CompletedCheckpoint) -> None:
        """Tell every subtask that the checkpoint is decided."""
        for subtask in self._subtasks:
            subtask.post(Complete(checkpoint.checkpoint, {}))
        self._settle_mail()

    def run_until_quiet(self) -> None:
        """Let everything that can be read and is due come through."""
        quiet = 0
        before = -1
        for _ in range(STEPS_MAX):
            for subtask in self._rng.sample(self._subtasks, len(self._subtasks)):
                subtask._step()
                self._raise_failures()
            seen = sum(
                operator.records_in for subtask in self._subtasks for operator in subtask._operators
            )
            busy = any(_is_busy(subtask) for subtask in self._subtasks) or seen != before
            before = seen
            quiet = 0 if busy else quiet + 1
            if quiet > len(self._builders[0].gates) + 1:
                return
        raise AssertionError("the job never becomes quiet")

    def close(self) -> None:
        """Drop the subtasks, as a kill does."""
        for subtask in self._subtasks:
            subtask._close()

    def _settle_mail(self) -> None:
        for subtask in self._subtasks:
            while (mail := subtask.gate.take_mail()) is not None:
                subtask._handle(mail)
        self._raise_failures()

    def _take_reports(self) -> list[SubtaskReport]:
        reports, self._reports[:] = list(self._reports), []
        return reports

    def _raise_failures(self) -> None:
        for report in self._reports:
            if isinstance(report, PartFailed):
                raise report.error


def _is_busy(subtask: Subtask) -> bool:
    due_in_s = subtask._operators[0].due_in_s
    # What waits for the clock where all input has ended does not fire.
    ends = isinstance(subtask, ReceivingSubtask) and not subtask._alignment.may_emit
    is_due = due_in_s is not None and due_in_s <= 0 and not ends
    return is_due or bool(subtask.gate.waiting()) or not subtask._flush()


def _beginning(parallelism: int, splits: Mapping[str, tuple[bytes, ...]]) -> CompletedCheckpoint:
    from onceflow.core.runtime.dataflow.source_operator import SPLITS

    operators = tuple(OperatorSnapshot(uid, lists={SPLITS: told}) for uid, told in splits.items())
    snapshot = SubtaskSnapshot(SubtaskRef("sources", 0), operators)
    return CompletedCheckpoint(
        CheckpointId(0), AttemptId(0), parallelism, MAX_PARALLELISM, (snapshot,), 0, 0
    )


def graph_of(pipeline: Pipeline) -> Graph:
    """Return what a pipeline's streams have come to."""
    return pipeline._graph.graph()


def new_pipeline() -> Pipeline:
    """Return an empty pipeline that is never started."""
    checkpointing = Checkpointing(storage="memory")
    return Pipeline(LocalProcesses(), name="program", checkpointing=checkpointing)
