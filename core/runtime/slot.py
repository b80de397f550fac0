"""A slot: one Spark barrier task, one Python worker process, subtask i of every chain.

Threads of a slot: the task's own thread reads the control stream; each chain has one; each sink has
a committer; two upload snapshots; one beats the heart; Flight's serve the channels. The process
leaves
in one of three ways:
    Stop     all is committed: close everything, return from the task
    Cancel   the attempt is over: roll back what is open, commit nothing more, return from the task
    lost     the driver is gone or a close hangs: `os._exit`, for nobody is left to report to
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

import onceflow
from onceflow.core.crash_points import reach
from onceflow.core.errors import OnceflowError, SlotLost, StorageError
from onceflow.core.graph import Operator, WriteTo
from onceflow.core.protocol.commits import CommitQueue, CommitRetryPolicy
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.snapshots import OperatorSnapshot, SnapshotTimings, SubtaskSnapshot
from onceflow.core.runtime.chain_builder import ChainBuilder, SlotParts, SlotPlan
from onceflow.core.runtime.commit_worker import CommitWorker
from onceflow.core.runtime.control_plane import ControlStream
from onceflow.core.runtime.data_plane import DataServer
from onceflow.core.runtime.messages import (
    Abort,
    Acked,
    Cancel,
    CommittedThrough,
    Complete,
    Declined,
    Deploy,
    DriverMessage,
    Failed,
    Goodbye,
    Heartbeat,
    Hello,
    Running,
    SlotMessage,
    SourceExhausted,
    Stop,
    Trigger,
)
from onceflow.core.runtime.operators import PendingSnapshot
from onceflow.core.runtime.sink_meter import SinkMeter
from onceflow.core.runtime.subtask import (
    CheckpointAborted,
    CheckpointCompleted,
    CheckpointTriggered,
    Leave,
    Subtask,
)
from onceflow.core.spi import CommitterContext
from onceflow.core.storage import FileStateWriter, FileSystemStorage

_log = logging.getLogger("onceflow.runtime.slot")

CLOSE_TIMEOUT_S = 5.0
"""How long a slot may take to close before it exits the hard way; below `cancel_timeout_s`."""


@dataclass(frozen=True, slots=True)
class SlotTask:
    """Everything that Spark carries to a slot."""

    plan: SlotPlan
    driver_address: str
    token: str
    storage: FileSystemStorage
    storage_token_path: str
    log_id: str
    loopback: bool

    def run(self, slot: int) -> str:
        """Run slot number `slot` to its end; return how it ended. The body of the Spark task."""
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
        self._uploader = ThreadPoolExecutor(2, thread_name_prefix="upload")
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="beside")
        self._subtasks: tuple[Subtask, ...] = ()
        self._commit_workers: list[CommitWorker] = []
        self._committed: dict[SubtaskRef, dict[str, CheckpointId]] = {}
        self._committed_lock = threading.Lock()
        self._builder: ChainBuilder | None = None
        self._failed = False
        self._deploying = False
        self._leaving = threading.Event()
        self._heard_at = time.monotonic()
        host = "127.0.0.1" if task.loopback else _own_address()
        self._data_server = DataServer(
            host,
            task.token,
            task.plan.attempt,
            self._channel_lost,
            task.plan.settings.start_timeout_s,
        )
        self._control = ControlStream(task.driver_address, task.token, self._hello(host))

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

    # --- what the driver says -----------------------------------------------------------------

    def _on_message(self, message: DriverMessage) -> None:
        match message:
            case Deploy():
                self._deploy(message)
            case Trigger(barrier):
                for subtask in self._subtasks:
                    if subtask.ref.chain in self._source_chains():
                        subtask.gate.post(CheckpointTriggered(barrier))
            case Complete(checkpoint, needed_from):
                self._complete(checkpoint, needed_from)
            case Abort(checkpoint, reason):
                for subtask in self._subtasks:
                    subtask.gate.post(CheckpointAborted(checkpoint, reason))
            case Heartbeat() | Stop() | Cancel():
                pass

    def _source_chains(self) -> set[str]:
        return {uid for uid, _ in self._plan.graph.sources()}

    def _deploy(self, deploy: Deploy) -> None:
        parts = SlotParts(
            slot=self._slot,
            token=self._task.token,
            storage=self._storage,
            scratch_dir=self._scratch,
            reports=self,
            beside=self._beside.submit,
            commit_worker=self._commit_worker,
        )
        self._deploying = True
        self._builder = ChainBuilder(self._plan, parts, deploy)
        self._data_server.serve_gates(self._builder.gates)
        self._subtasks = self._builder.build()
        for subtask in self._subtasks:
            subtask.start()
        self._heard_at, self._deploying = time.monotonic(), False
        self._send(Running(self._plan.attempt, self._slot))

    def _complete(self, checkpoint: CheckpointId, proofs_needed_from: CheckpointId) -> None:
        for worker in self._commit_workers:
            worker.completed(checkpoint, proofs_needed_from)
        for subtask in self._subtasks:
            subtask.gate.post(CheckpointCompleted(checkpoint))
            if subtask.ref not in self._committed:
                self._send(CommittedThrough(self._plan.attempt, subtask.ref, checkpoint))

    def _commit_worker(self, ref: SubtaskRef, operator: Operator, work: WriteTo) -> CommitWorker:
        context = CommitterContext(
            job=self._plan.job,
            uid=operator.uid,
            sink_id=work.sink_id,
            attempt=self._plan.attempt,
            log_id=self._task.log_id,
            staging=self._storage.staging(work.sink_id),
        )
        self._committed.setdefault(ref, {})[operator.uid] = CheckpointId(0)

        def committed(through: CheckpointId, commit_ms: float) -> None:
            with self._committed_lock:
                self._committed[ref][operator.uid] = through
                lowest = min(self._committed[ref].values())
            self._send(CommittedThrough(self._plan.attempt, ref, lowest, round(commit_ms, 3)))

        worker = CommitWorker(
            f"{operator.uid}[{ref.index}]",
            CommitQueue(CommitRetryPolicy(deadline_s=self._plan.settings.commit_deadline_s)),
            work.sink.committer(context),
            committed=committed,
            failed=self._report_failure,
            meter=SinkMeter(operator.uid, work.sink_id, ref.index),
        )
        self._commit_workers.append(worker)
        return worker

    # --- what the subtasks report (SlotReports) -----------------------------------------------

    def snapshot_taken(
        self,
        subtask: SubtaskRef,
        checkpoint: CheckpointId,
        pending: Sequence[PendingSnapshot],
        timings: SnapshotTimings,
    ) -> None:
        """Upload and ack on another thread; nothing is acked before it is durable (I4)."""
        self._uploader.submit(self._upload, subtask, checkpoint, tuple(pending), timings)

    def _upload(
        self,
        subtask: SubtaskRef,
        checkpoint: CheckpointId,
        pending: tuple[PendingSnapshot, ...],
        timings: SnapshotTimings,
    ) -> None:
        began = time.perf_counter()
        attempt = self._plan.attempt
        writers: list[FileStateWriter] = []
        try:
            operators: list[OperatorSnapshot] = []
            for snapshot in pending:
                writer = self._storage.writer(attempt, checkpoint, snapshot.uid, subtask.index)
                writers.append(writer)
                operators.append(snapshot.upload(writer))
        except StorageError as error:
            for writer in writers:
                writer.abandon()
            self.snapshot_declined(subtask, checkpoint, str(error))
            return
        except BaseException as error:
            self._report_failure(error)
            return
        timings = replace(
            timings,
            async_ms=round((time.perf_counter() - began) * 1000, 3),
            size_bytes=sum(h.size_bytes for o in operators for h in o.keyed + o.raw),
        )
        done = SubtaskSnapshot(subtask, tuple(operators), timings)
        self._send(Acked(attempt, checkpoint, done))
        if any(operator.committables for operator in operators):
            reach("acked")

    def snapshot_declined(self, subtask: SubtaskRef, checkpoint: CheckpointId, reason: str) -> None:
        """Tell the driver that this checkpoint cannot complete."""
        self._send(Declined(self._plan.attempt, checkpoint, subtask, reason))

    def source_exhausted(self, subtask: SubtaskRef) -> None:
        """Tell the driver that a source has emitted its last record."""
        self._send(SourceExhausted(self._plan.attempt, subtask))

    def subtask_failed(self, subtask: SubtaskRef, error: BaseException) -> None:
        """End the attempt, unless it is ending already."""
        if not self._leaving.is_set():
            self._report_failure(error)

    # --- the end ------------------------------------------------------------------------------

    def _channel_lost(self, reason: str) -> None:
        if not self._leaving.is_set():
            self._report_failure(SlotLost(reason))

    def _report_failure(self, error: BaseException) -> None:
        """Tell the driver once; it answers with Cancel, or its silence ends the process."""
        if self._failed or self._leaving.is_set():
            return
        self._failed = True
        self._send(
            Failed(
                self._plan.attempt,
                self._slot,
                type(error).__name__,
                str(error) or type(error).__name__,
                "".join(traceback.format_exception(error)),
                error.retry if isinstance(error, OnceflowError) else "job",
            )
        )

    def _send(self, message: SlotMessage) -> None:
        with contextlib.suppress(SlotLost):  # the control loop notices and exits
            self._control.send(message)

    def _leave(self, message: Stop | Cancel) -> None:
        """Close everything within a deadline; a thread that hangs ends the process instead."""
        self._leaving.set()
        reason = message.reason
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for channel in self._builder.channels if self._builder else ():
            channel.close(reason)
        for subtask in self._subtasks:
            subtask.gate.post(Leave())
        left: Callable[[], float] = lambda: max(0.0, deadline - time.monotonic())  # noqa: E731
        ended = min((subtask.join(left()) for subtask in self._subtasks), default=True)
        for worker in self._commit_workers:
            worker.close(left())
        self._uploader.shutdown(wait=ended, cancel_futures=True)
        self._beside.shutdown(wait=False, cancel_futures=True)
        self._data_server.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
        # The counters of a short job must not end with whatever the last beat happened to see.
        self._send(self._heartbeat())
        self._send(Goodbye(self._plan.attempt, self._slot))
        if not ended:
            self._exit_hard(f"{reason}; a subtask did not end within {CLOSE_TIMEOUT_S} s")
        self._control.close()
        gc.unfreeze()

    def _exit_hard(self, reason: str) -> None:
        """End this process now: its connections close, and servers roll back what was open."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        _log.warning("slot %d of job %s exits: %s", self._slot, self._plan.job, reason)
        logging.shutdown()
        os._exit(1)

    def _beat(self) -> None:
        settings = self._plan.settings
        while not self._leaving.wait(settings.heartbeat_interval_s):
            silent_s = time.monotonic() - self._heard_at
            # While state is restored nobody reads the control stream; the driver has a deadline.
            if silent_s > settings.heartbeat_timeout_s and not self._deploying:
                self._exit_hard(f"nothing heard from the driver for {silent_s:.0f} s")
            self._send(self._heartbeat())

    def _heartbeat(self) -> Heartbeat:
        metrics = tuple(subtask.metrics() for subtask in self._subtasks)
        sinks = tuple(worker.meter.metrics() for worker in self._commit_workers)
        return Heartbeat(self._plan.attempt, self._slot, metrics, _rss_bytes(), sinks)

    def _hello(self, host: str) -> Hello:
        return Hello(
            attempt=self._plan.attempt,
            slot=self._slot,
            pid=os.getpid(),
            parent_pid=os.getppid(),
            host=host,
            data_address=f"grpc://{host}:{self._data_server.port}",
            versions=versions(),
            storage_probe=self._storage.probe_read(self._task.storage_token_path),
        )


def versions() -> dict[str, str]:
    """Return the versions that driver and executors must share."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "onceflow": onceflow.__version__,
        "pyarrow": pa.__version__,
        "numpy": np.__version__,
        "msgspec": msgspec.__version__,
    }


def _rss_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - hot, tiny
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else peak * 1024


def _own_address() -> str:
    return socket.gethostbyname(socket.gethostname())
