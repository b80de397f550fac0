"""A slot: one Spark barrier task, one Python worker process, subtask i of every chain.

Threads of a slot: the task's own thread reads the control stream and another one writes to it; each
chain has one; each sink has a committer; two upload snapshots; one beats the heart, and one asks
the peers of channels for theirs; Flight's serve the channels. The process leaves in one of three
ways:
    Stop     all is committed: close everything, return from the task
    Cancel   the attempt is over: roll back what is open, commit nothing more, return from the task
    lost     the driver is gone or a close hangs: `os._exit`, for nobody is left to report to
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from onceflow.core.config import TlsFiles
from onceflow.core.crash_points import reach
from onceflow.core.errors import ConfigError, SlotLost
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.snapshots import SnapshotTimings, SubtaskSnapshot
from onceflow.core.runtime.dataflow.operators import PendingSnapshot
from onceflow.core.runtime.dataflow.subtask import (
    CheckpointAborted,
    CheckpointCompleted,
    CheckpointTriggered,
    Shutdown,
    SplitsOffered,
    Subtask,
)
from onceflow.core.runtime.messages import (
    Abort,
    Acked,
    Cancel,
    CommittedThrough,
    Complete,
    Declined,
    Deploy,
    DriverMessage,
    Heartbeat,
    Hello,
    OfferSplits,
    Running,
    SlotClosed,
    SlotMessage,
    SourceExhausted,
    Stop,
    Trigger,
)
from onceflow.core.runtime.slot.chain_builder import ChainBuilder, SlotContext
from onceflow.core.runtime.slot.commits import SlotCommits
from onceflow.core.runtime.slot.context import SlotPlan, own_address, rss_bytes, versions
from onceflow.core.runtime.slot.failure_report import failed_message
from onceflow.core.runtime.slot.interrupts import interrupts_ignored
from onceflow.core.runtime.slot.program import Program, unpickled_program
from onceflow.core.runtime.slot.snapshot_uploads import SnapshotUploads
from onceflow.core.runtime.transport.control_plane import ControlStream
from onceflow.core.runtime.transport.credentials import Credentials, TlsIdentity, identity_in
from onceflow.core.runtime.transport.data_plane import DataServer, FlightChannel, KeepAlive
from onceflow.core.storage import FileSystemStorage

_log = logging.getLogger("onceflow.runtime.slot")

CLOSE_TIMEOUT_S = 5.0
"""How long a slot may take to close before it exits the hard way; below `cancel_timeout_s`."""


@dataclass(frozen=True, slots=True)
class SlotTask:
    """Everything that Spark carries to a slot: how to reach the driver, and no more.

    Spark keeps it on executors' disks, so nothing that outlives the attempt may be secret here.
    """

    plan: SlotPlan
    driver_address: str
    token: str = field(repr=False)
    tls: TlsIdentity | TlsFiles | None
    storage: FileSystemStorage
    storage_token_path: str
    log_id: str
    loopback: bool

    def run(self, slot: int) -> str:
        """Run slot number `slot` to its end; return how it ended. The body of the Spark task."""
        with interrupts_ignored():
            return Slot(self, slot).run()


class Slot:
    """The running slot: everything that happens in this process for one attempt."""

    def __init__(self, task: SlotTask, slot: int) -> None:
        self._task = task
        self._plan = task.plan
        self._slot = slot
        self._storage = task.storage.open(task.plan.job)
        base = task.plan.settings.scratch_dir or tempfile.gettempdir()
        self._scratch = Path(tempfile.mkdtemp(prefix=f"onceflow-{task.plan.job}-{slot}-", dir=base))
        self._uploads = SnapshotUploads(self._storage, self._plan.attempt, self)
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="beside")
        self._subtasks: tuple[Subtask, ...] = ()
        self._sources: frozenset[str] = frozenset()
        self._commits = SlotCommits(
            self._plan,
            self._storage,
            task.log_id,
            committed=self._committed_through,
            failed=self._report_failure,
        )
        self._builder: ChainBuilder | None = None
        self._keep_alive: KeepAlive | None = None
        self._failed = False
        self._deploying = False
        self._leaving = threading.Event()
        self._heard_at = time.monotonic()
        tls = identity_in(task.tls) if isinstance(task.tls, TlsFiles) else task.tls
        self._credentials = Credentials(task.token, tls)
        host = "127.0.0.1" if task.loopback else own_address()
        self._data_server = DataServer(
            host,
            self._credentials,
            task.plan.attempt,
            self._channel_lost,
            task.plan.settings.start_timeout_s,
        )
        self._control = ControlStream(task.driver_address, self._credentials, self._hello(host))

    def run(self) -> str:
        """Follow the driver until it says stop or cancel, or is gone."""
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)  # batches make many short-lived objects and no cycles
        # A thread that comes back from the network waits this long for one that computes.
        sys.setswitchinterval(0.001)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        ended = "the driver is gone"
        try:
            for message in self._control.messages():
                self._heard_at = time.monotonic()
                if isinstance(message, (Stop, Cancel)):
                    ended = message.reason
                    self._leave(message)
                    return ended
                self._on_message(message)
        except BaseException as error:
            self._report_failure(error)
            _log.exception("slot %d failed", self._slot)
        self._exit_hard(ended)
        return ended

    def _on_message(self, message: DriverMessage) -> None:
        match message:
            case Deploy():
                self._load_and_deploy(message)
            case Trigger(barrier):
                self._post(self._sources, CheckpointTriggered(barrier))
            case OfferSplits(uid, splits):
                self._post({uid}, SplitsOffered(splits))
            case Complete(checkpoint, needed_from):
                self._complete(checkpoint, needed_from)
            case Abort(checkpoint, reason):
                for subtask in self._subtasks:
                    subtask.gate.post(CheckpointAborted(checkpoint, reason))
            case Heartbeat() | Stop() | Cancel():
                pass

    def _post(self, chains: Set[str], mail: object) -> None:
        for subtask in self._subtasks:
            if subtask.ref.chain in chains:
                subtask.gate.post(mail)

    def _load_and_deploy(self, deploy: Deploy) -> None:
        self._deploying = True
        try:
            program = unpickled_program(deploy.program)
        except ConfigError as error:
            self._report_failure(error)  # nothing is built yet: leave in good order when told to
        else:
            self._deploy(deploy, program)
        self._heard_at, self._deploying = time.monotonic(), False

    def _deploy(self, deploy: Deploy, program: Program) -> None:
        self._sources = frozenset(uid for uid, _ in program.graph.sources())
        parts = SlotContext(
            slot=self._slot,
            credentials=self._credentials,
            storage=self._storage,
            scratch_dir=self._scratch,
            reports=self,
            beside=self._beside.submit,
            commit_worker=self._commits.worker,
        )
        self._builder = ChainBuilder(self._plan, program, parts, deploy)
        self._data_server.serve_gates(self._builder.gates)
        self._subtasks = self._builder.build()
        settings = self._plan.settings
        self._keep_alive = KeepAlive(
            [one for one in self._builder.channels if isinstance(one, FlightChannel)],
            self._channel_lost,
            timeout_s=settings.heartbeat_timeout_s,
            start_timeout_s=settings.start_timeout_s,
        )
        for subtask in self._subtasks:
            subtask.start()
        dropped = tuple(self._builder.dropped)
        self._send(Running(self._plan.attempt, self._slot, dropped))

    def _complete(
        self, checkpoint: CheckpointId, retain_ledger_from: Mapping[str, CheckpointId]
    ) -> None:
        for subtask in self._subtasks:
            subtask.gate.post(CheckpointCompleted(checkpoint))
        refs = [subtask.ref for subtask in self._subtasks]
        self._commits.completed(checkpoint, retain_ledger_from, refs)

    def completion_heard(self, subtask: SubtaskRef, checkpoint: CheckpointId) -> None:
        """Confirm the checkpoint as soon as all sinks of the subtask have committed it too."""
        self._commits.heard(subtask, checkpoint)

    def _committed_through(
        self, ref: SubtaskRef, confirmed: CheckpointId, committed: CheckpointId, commit_ms: float
    ) -> None:
        self._send(CommittedThrough(self._plan.attempt, ref, confirmed, commit_ms, committed))

    def snapshot_taken(
        self,
        subtask: SubtaskRef,
        checkpoint: CheckpointId,
        pending: Sequence[PendingSnapshot],
        timings: SnapshotTimings,
    ) -> None:
        """Upload and ack on another thread; nothing is acked before it is durable (I4)."""
        self._uploads.begin(subtask, checkpoint, tuple(pending), timings)

    def snapshot_uploaded(self, checkpoint: CheckpointId, snapshot: SubtaskSnapshot) -> None:
        """Ack a snapshot that is durable."""
        self._send(Acked(self._plan.attempt, checkpoint, snapshot))
        if any(operator.committables for operator in snapshot.operators):
            reach("acked")

    def snapshot_declined(self, subtask: SubtaskRef, checkpoint: CheckpointId, reason: str) -> None:
        """Tell the driver that this checkpoint cannot complete."""
        self._send(Declined(self._plan.attempt, checkpoint, subtask, reason))

    def source_exhausted(self, subtask: SubtaskRef) -> None:
        """Tell the driver that a source has emitted its last record."""
        self._send(SourceExhausted(self._plan.attempt, subtask))

    def upload_failed(self, error: BaseException) -> None:
        """End the attempt: what went wrong is not the storage's."""
        self._report_failure(error)

    def subtask_failed(self, subtask: SubtaskRef, error: BaseException) -> None:
        """End the attempt, unless it is ending already."""
        if not self._leaving.is_set():
            self._report_failure(error)

    def _channel_lost(self, reason: str) -> None:
        if not self._leaving.is_set():
            self._report_failure(SlotLost(reason))

    def _report_failure(self, error: BaseException) -> None:
        """Tell the driver once; it answers with Cancel, or its silence ends the process.

        A slot that cannot say what went wrong must not go on as if nothing had: it exits.
        """
        if self._failed or self._leaving.is_set():
            return
        self._failed = True
        try:
            self._send(failed_message(self._plan.attempt, self._slot, error))
        except BaseException as unsaid:
            self._exit_hard(f"{type(error).__name__} could not be reported: {unsaid!a}")

    def _send(self, message: SlotMessage) -> None:
        with contextlib.suppress(SlotLost):  # the control loop notices and exits
            self._control.send(message)

    def _leave(self, message: Stop | Cancel) -> None:
        """Close everything within a deadline; a thread that hangs ends the process instead."""
        self._leaving.set()
        reason = message.reason
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        if self._keep_alive:
            self._keep_alive.end()
        for channel in self._builder.channels if self._builder else ():
            channel.close(reason)
        for subtask in self._subtasks:
            subtask.gate.post(Shutdown())
        left: Callable[[], float] = lambda: max(0.0, deadline - time.monotonic())  # noqa: E731
        ended = min((subtask.join(left()) for subtask in self._subtasks), default=True)
        ended = self._commits.close(left) and ended
        ended = self._uploads.close(left()) and ended
        self._beside.shutdown(wait=False, cancel_futures=True)
        ended = self._data_server.close(left()) and ended
        shutil.rmtree(self._scratch, ignore_errors=True)
        # The counters of a short job must not end with whatever the last beat happened to see.
        self._send(self._heartbeat())
        self._send(SlotClosed(self._plan.attempt, self._slot))
        self._control.close(max(1.0, left()))
        if not ended:
            self._exit_hard(f"{reason}; not all has ended within {CLOSE_TIMEOUT_S} s")
        gc.unfreeze()

    def _exit_hard(self, reason: str) -> None:
        """End this process now: its connections close, and servers roll back what was open."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        _log.warning("slot %d of job %s exits: %s", self._slot, self._plan.job, reason)
        logging.shutdown()
        os._exit(1)

    def _beat(self) -> None:
        """Tell the driver once an interval that the slot lives, and look who else does.

        Nothing here may wait for a peer.
        """
        settings = self._plan.settings
        while not self._leaving.wait(settings.heartbeat_interval_s):
            now = time.monotonic()
            silent_s = now - self._heard_at
            # While state is restored nobody reads the control stream; the driver has a deadline.
            if silent_s > settings.heartbeat_timeout_s and not self._deploying:
                self._exit_hard(f"nothing heard from the driver for {silent_s:.0f} s")
            try:
                self._send(self._heartbeat())
                if self._keep_alive:
                    self._keep_alive.check(now)
            except BaseException as error:
                self._report_failure(error)

    def _heartbeat(self) -> Heartbeat:
        metrics = tuple(subtask.metrics() for subtask in self._subtasks)
        return Heartbeat(
            self._plan.attempt, self._slot, metrics, rss_bytes(), self._commits.metrics()
        )

    def _hello(self, host: str) -> Hello:
        return Hello(
            attempt=self._plan.attempt,
            slot=self._slot,
            pid=os.getpid(),
            parent_pid=os.getppid(),
            host=host,
            data_address=self._data_server.address,
            versions=versions(),
            storage_probe=self._storage.probe_read(self._task.storage_token_path),
        )
