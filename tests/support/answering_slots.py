"""A job of very many subtasks whose slots only answer messages.

The job, its driver, its log and its status are real. The slots answer at the edge of the transport,
all on one thread. What they say passes through the bytes of the control stream, in both directions.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from benchmarks.discarding_sink import DiscardingSink

from onceflow import Checkpointing, Job, LocalProcesses, NoRestart, Pipeline, sum_
from onceflow.core.errors import OnceflowError
from onceflow.core.protocol.checkpoints.decisions import Barrier
from onceflow.core.protocol.checkpoints.snapshots import (
    OperatorSnapshot,
    StateHandle,
    SubtaskSnapshot,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.loops.attempt_facts import SlotMessageReceived
from onceflow.core.protocol.messages import (
    Acked,
    CommittedThrough,
    Complete,
    Deploy,
    DriverMessage,
    Heartbeat,
    Hello,
    Running,
    Shutdown,
    SlotClosed,
    SlotMessage,
)
from onceflow.core.protocol.splits import SplitState, key_group_range
from onceflow.core.runtime.dataflow.source_operator import SPLITS, encode_split
from onceflow.core.runtime.messages import decode_message, encode_message
from onceflow.core.runtime.slot.context import AttemptPlan, versions
from onceflow.core.runtime.transport.control_plane import ControlEvent, SlotConnected, SlotLink
from onceflow.sources import DatagenSource

SOURCE, KEYED, SINK = "payments", "balance", "ledger"
_TIMEOUT_S = 120.0
_PAYMENTS = DatagenSource(rows=None, splits_count=400)
"""The source of the job at any parallelism: its splits outnumber the slots."""
_SPLITS = _PAYMENTS.splits()


class ManySlots:
    """A cluster whose slots are answers: any number of them on one thread."""

    is_local = True
    driver_host = "127.0.0.1"

    def __init__(self) -> None:
        self.said: Counter[str] = Counter()
        """Messages by class, both ways."""
        self._post: Callable[[ControlEvent], None] = lambda _: None
        self._asked: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._plan: AttemptPlan | None = None

    def check(self, parallelism: int) -> None:
        """Return at once: there can be any number of slots."""

    def check_alive(self) -> None:
        """Return at once."""

    def await_slots(self, parallelism: int, timeout_s: float) -> None:
        """Return at once."""

    def take_signals(self) -> None:
        """Return at once: slots are no processes."""

    def control_server(
        self, host: str, credentials: object, post: Callable[[ControlEvent], None]
    ) -> _Server:
        """Stand in for the server that slots dial."""
        del host, credentials
        self._post = post
        return _Server(self)

    def start(self, plan: AttemptPlan, ended: Callable[[OnceflowError], None]) -> Any:
        """Have every slot dial in."""
        del ended
        self._plan = plan
        for work in (self._answer, self._read):
            thread = threading.Thread(target=work, daemon=True)
            self._threads.append(thread)
            thread.start()
        probe = plan.storage.open(plan.job).probe_read(plan.storage_token_path)
        for slot in range(plan.parallelism):
            address = f"grpc://127.0.0.1:{slot}"
            hello = Hello(plan.attempt, slot, slot, 1, "here", address, versions(), probe)
            self._post(SlotConnected(_Link(hello, self)))
        return self

    def kill(self) -> None:
        """End both threads."""
        self._asked.put(None)
        self._told.put(None)

    def join(self, timeout_s: float) -> bool:
        """End both threads; return whether they have ended."""
        self.kill()
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def ask_all(self, message: DriverMessage) -> None:
        """Take a message of the driver's to every slot that has dialled in."""
        for slot in range(self._plan.parallelism if self._plan else 0):
            self.ask(slot, encode_message(message))

    def ask(self, slot: int, data: bytes) -> None:
        """Take a message of the driver's to `slot`."""
        self._asked.put((slot, data))

    def _answer(self) -> None:
        while (asked := self._asked.get()) is not None:
            slot, data = asked
            message = cast("DriverMessage", decode_message(data))
            if not isinstance(message, Heartbeat):
                self.said[type(message).__name__] += 1
            for answer in self._answers(slot, message):
                self.said[type(answer).__name__] += 1
                self._told.put((slot, encode_message(answer)))

    def _read(self) -> None:
        """Read one stream, as a thread of the driver does, in the driver's own time."""
        assert self._plan is not None
        while (told := self._told.get()) is not None:
            slot, data = told
            message = cast("SlotMessage", decode_message(data))
            self._post(SlotMessageReceived(self._plan.attempt, slot, message))

    def _answers(self, slot: int, message: DriverMessage) -> list[SlotMessage]:
        match message:
            case Deploy():
                return [Running()]
            case Barrier(checkpoint):
                return [
                    Acked(checkpoint, snapshot) for snapshot in self._snapshots(slot, checkpoint)
                ]
            case Complete(checkpoint):
                refs = (SubtaskRef(chain, slot) for chain in (SOURCE, KEYED))
                return [CommittedThrough(ref, checkpoint, 1.0, checkpoint) for ref in refs]
            case Shutdown():
                return [SlotClosed()]
            case _:
                return []

    def _snapshots(self, slot: int, checkpoint: CheckpointId) -> list[SubtaskSnapshot]:
        assert self._plan is not None
        plan = self._plan
        groups = key_group_range(plan.max_parallelism, plan.parallelism, slot)
        inline, first, last = b"s" * 300, groups.start, groups.stop - 1
        state = StateHandle("keyed", "", len(inline), "0" * 64, first, last, inline=inline)
        rows = Committable(TransactionId(f"many.{SINK}", plan.attempt, checkpoint, slot), 10)
        position = encode_split(SplitState(_SPLITS[slot]))
        return [
            SubtaskSnapshot(
                SubtaskRef(SOURCE, slot), (OperatorSnapshot(SOURCE, lists={SPLITS: (position,)}),)
            ),
            SubtaskSnapshot(
                SubtaskRef(KEYED, slot),
                (
                    OperatorSnapshot(KEYED, keyed=(state,)),
                    OperatorSnapshot(SINK, committables=(rows,)),
                ),
            ),
        ]


class _Server:
    address = "grpc://127.0.0.1:0"

    def __init__(self, slots: ManySlots) -> None:
        self._slots = slots

    def dismiss(self, reason: str) -> None:
        self._slots.ask_all(Shutdown(reason))

    def close(self, timeout_s: float) -> bool:
        del timeout_s
        return True


class _Link(SlotLink):
    def __init__(self, hello: Hello, slots: ManySlots) -> None:
        self.hello = hello
        self._slots = slots

    def send(self, message: DriverMessage) -> None:
        self._slots.ask(self.hello.slot, encode_message(message))

    def waiting_s(self, now: float) -> float:
        del now
        return 0.0

    def close(self) -> None:
        pass


@contextmanager
def running_job(parallelism: int, directory: Path) -> Generator[tuple[Job, ManySlots], None, None]:
    """Run a job of two chains on `parallelism` such slots; it is cancelled after the block."""
    slots = ManySlots()
    with (
        patch("onceflow.core.api.pipeline._to_cluster", return_value=slots),
        patch("onceflow.core.runtime.driver.attempt_start.ControlServer", slots.control_server),
    ):
        pipeline = Pipeline(
            LocalProcesses(),
            name="many",
            parallelism=parallelism,
            checkpointing=Checkpointing(storage=str(directory), interval=None),
            restart=NoRestart(),
            endpoint=None,
        )
        payments = pipeline.read(_PAYMENTS, uid=SOURCE)
        balances = payments.key_by("account").running(balance=sum_("amount"), uid=KEYED)
        balances.write(DiscardingSink(str(directory)), uid=SINK)
        job = pipeline.start()
        try:
            _await(job, lambda: job.state.value == "running")
            yield job, slots
        finally:
            job.cancel(_TIMEOUT_S)


def take_checkpoint(job: Job, slots: ManySlots) -> int:
    """Take one checkpoint; return how many messages it took until all subtasks committed it."""
    completed, messages = job.status().checkpoints_completed, slots.said.total()
    job.checkpoint()
    _await(job, lambda: _committed(job, completed + 1))
    return slots.said.total() - messages


def _committed(job: Job, count: int) -> bool:
    status = job.status()
    last = status.last_checkpoint
    done = last is not None and last.committed_ms is not None
    return status.checkpoints_completed >= count and done


def _await(job: Job, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not holds():
        status = job.status()
        if status.state.ended or time.monotonic() > deadline:
            raise TimeoutError(f"job is {status.state.value}: {status.last_error}")
        time.sleep(0.01)
