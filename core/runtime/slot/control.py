"""The owner of a slot's control stream: what the slot hears, what it says, and when it ends.

One thread with one mailbox. What the driver says, what the parts of the slot report and the time
reach it one after the other, so nothing here needs a lock; and it waits for nothing before the end,
so heartbeats go on and a shutdown is heard whatever the parts do. The slot leaves in one of two
ways:
    Shutdown   close everything within a deadline, say so, return from the task
    lost       the driver is gone or a close hangs: `os._exit`, for nobody is left to report to
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeAlias

from onceflow.core.crash_points import reach
from onceflow.core.errors import SlotLost
from onceflow.core.protocol.decisions import NotifyAbort, TriggerCheckpoint
from onceflow.core.protocol.messages import (
    Acked,
    Complete,
    CompletionHeard,
    Declined,
    Deploy,
    DriverMessage,
    GloballyCommitted,
    Heartbeat,
    Hello,
    OfferSplits,
    PartFailed,
    Running,
    Shutdown,
    SinkCommitted,
    SlotClosed,
    SlotMessage,
    SourceExhausted,
    SubtaskMail,
)
from onceflow.core.runtime.dataflow.subtask import SnapshotTaken, SourceSubtask, Subtask
from onceflow.core.runtime.messages import report_of_failure
from onceflow.core.runtime.slot.chain_builder import Chains
from onceflow.core.runtime.slot.context import SlotContext, SlotMail, rss_bytes
from onceflow.core.runtime.slot.snapshot_uploads import SnapshotUploads
from onceflow.core.runtime.transport.control_plane import ControlStream, DriverGone
from onceflow.core.runtime.transport.data_plane import DataServer, FlightChannel, KeepAlive

_log = logging.getLogger("onceflow.runtime.slot")

CLOSE_TIMEOUT_S: Final = 5.0
"""How long a slot may take to close before it exits the hard way; below `cancel_timeout_s`."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The chains are built and have their state."""

    chains: Chains


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """The chains could not be built, or not given their state."""

    error: BaseException
    leftovers: bool
    """Whether some were built, which nobody closes: the process must not live on."""


ControlMail: TypeAlias = DriverMessage | DriverGone | SlotMail | Restored | RestoreFailed


class SlotControl:
    """Decides what a slot does next. `run` is its thread; whatever else is called is of any."""

    def __init__(
        self,
        context: SlotContext,
        mailbox: queue.SimpleQueue[ControlMail],
        data_server: DataServer,
        driver_address: str,
        hello: Hello,
    ) -> None:
        """Dial the driver.

        Raises:
            SlotLost: It cannot be reached or refuses.
        """
        self._context = context
        self._settings = context.plan.settings
        self._mailbox = mailbox
        self._data_server = data_server
        self._uploads = SnapshotUploads(context)
        self._chains: Chains | None = None
        self._keep_alive: KeepAlive | None = None
        self._restoring = False
        self._leftovers = False
        self._failed = False
        self._heard_at = time.monotonic()
        self.deploy: Future[Deploy | None] = Future()
        """What to restore; None when the slot ends before it is told."""
        self.ended: Future[str] = Future()
        """Why the slot is closed."""
        self._stream = ControlStream(driver_address, context.credentials, hello, self._hear)

    def run(self) -> None:
        """Do what the driver says until it says `Shutdown`, or is gone."""
        beat_at = time.monotonic() + self._settings.heartbeat_interval_s
        try:
            while not self.ended.done():
                with contextlib.suppress(queue.Empty):
                    wait_s = max(0.0, beat_at - time.monotonic())
                    self._take(self._mailbox.get(timeout=wait_s))
                if (now := time.monotonic()) >= beat_at:
                    beat_at = now + self._settings.heartbeat_interval_s
                    self._beat(now)
        except BaseException as error:
            _log.exception("slot %d failed", self._context.slot)
            self._fail(error)
            self._exit_hard("its control failed")

    def _hear(self, mail: DriverMessage | DriverGone | PartFailed) -> None:
        self._heard_at = time.monotonic()
        self._mailbox.put(mail)

    def _take(self, mail: ControlMail) -> None:
        """Do what `mail` says; what cannot be done, or said, fails the attempt."""
        try:
            self._on_mail(mail)
        except Exception as error:
            if self._context.closing.is_set():
                raise
            self._fail(error)

    def _on_mail(self, mail: ControlMail) -> None:
        match mail:
            case Deploy():
                self._restoring = True
                self.deploy.set_result(mail)
            case TriggerCheckpoint() | OfferSplits() | Complete() | NotifyAbort():
                self._on_checkpoint(mail)
            case Shutdown(reason):
                self._close(reason)
            case GloballyCommitted():
                if self._chains:
                    self._chains.commits.globally_committed(mail)
            case Heartbeat():
                pass
            case DriverGone(reason):
                self._exit_hard(reason)
            case Restored(chains):
                self._start(chains)
            case RestoreFailed(error, leftovers):
                self._restoring, self._leftovers = False, leftovers
                self._fail(error)
            case _:
                self._on_report(mail)

    def _on_checkpoint(
        self, mail: TriggerCheckpoint | OfferSplits | Complete | NotifyAbort
    ) -> None:
        match mail:
            case TriggerCheckpoint():
                self._post(mail, lambda subtask: isinstance(subtask, SourceSubtask))
            case OfferSplits(uid):
                self._post(mail, lambda subtask: subtask.ref.chain == uid)
            case NotifyAbort():
                self._post(mail)
            case Complete():
                self._post(mail)
                if chains := self._chains:
                    refs = [subtask.ref for subtask in chains.subtasks]
                    self._send(*chains.commits.completed(mail, refs))

    def _post(self, mail: SubtaskMail, to: Callable[[Subtask], bool] = lambda _: True) -> None:
        for subtask in self._chains.subtasks if self._chains else ():
            if to(subtask):
                subtask.gate.post(mail)

    def _on_report(self, report: SlotMail) -> None:
        """Take what a part of the slot reports; also while the slot closes."""
        match report:
            case SnapshotTaken():
                if not self._context.closing.is_set():
                    self._uploads.begin(report)
            case Acked():
                self._send(report)
                if any(operator.committables for operator in report.snapshot.operators):
                    reach("acked")
            case Declined() | SourceExhausted():
                self._send(report)
            case CompletionHeard() | SinkCommitted():
                if self._chains:  # before, nothing is decided
                    self._send(*self._chains.commits.progressed(report))
            case PartFailed(error):
                self._fail(error)

    def _start(self, chains: Chains) -> None:
        self._restoring, self._chains = False, chains
        for subtask in chains.subtasks:
            if self._context.closing.is_set():
                subtask.gate.post(Shutdown("the slot shuts down"))  # it closes its operators
            subtask.start()
        if self._context.closing.is_set():
            return
        self._keep_alive = KeepAlive(
            [one for one in chains.channels if isinstance(one, FlightChannel)],
            lambda reason: self._context.fail(SlotLost(reason)),
            timeout_s=self._settings.heartbeat_timeout_s,
            start_timeout_s=self._settings.start_timeout_s,
        )
        self._send(Running(chains.dropped))

    def _beat(self, now: float) -> None:
        """Tell the driver that the slot lives, and look who else does."""
        silent_s = now - self._heard_at
        if silent_s > self._settings.heartbeat_timeout_s:
            self._exit_hard(f"nothing heard from the driver for {silent_s:.0f} s")
        self._send(self._heartbeat())
        if self._keep_alive:
            self._keep_alive.check(now)

    def _heartbeat(self) -> Heartbeat:
        slot, chains = self._context.slot, self._chains
        if chains is None:
            return Heartbeat(slot, rss_bytes=rss_bytes())
        subtasks = tuple(subtask.metrics() for subtask in chains.subtasks)
        return Heartbeat(slot, subtasks, rss_bytes(), chains.commits.metrics())

    def _send(self, *messages: SlotMessage) -> None:
        with contextlib.suppress(SlotLost):  # the stream's end is mail, too
            for message in messages:
                self._stream.send(message)

    def _fail(self, error: BaseException) -> None:
        """Tell the driver once; it answers with Shutdown, or its silence ends the process.

        A slot that cannot say what went wrong must not go on as if nothing had: it exits.
        """
        if self._failed or self._context.closing.is_set():
            return
        self._failed = True
        try:
            self._send(report_of_failure(self._context.slot, error))
        except BaseException as unsaid:
            self._exit_hard(f"{type(error).__name__} could not be reported: {unsaid!a}")

    # --- the end ------------------------------------------------------------------------------

    def _close(self, reason: str) -> None:
        """Close everything within a deadline; a thread that hangs ends the process instead."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        left: Callable[[], float] = lambda: max(0.0, deadline - time.monotonic())  # noqa: E731
        self._context.closing.set()
        if self._keep_alive:
            self._keep_alive.end()
        if not self.deploy.done():
            self.deploy.set_result(None)
        ended = self._await_restored(left)
        if chains := self._chains:
            for channel in chains.channels:
                channel.close(reason)
            self._post(Shutdown(reason))
            ended = min(subtask.join(left()) for subtask in chains.subtasks) and ended
            ended = chains.commits.close(left) and ended
        ended = self._uploads.close(left()) and ended
        ended = self._data_server.close(left()) and ended
        self._take_reports()
        self._context.scratch.delete()
        # The counters of a short job must not end with whatever the last beat happened to see.
        self._send(self._heartbeat(), SlotClosed())
        self._stream.close(max(1.0, left()))
        if not ended:
            self._exit_hard(f"{reason}; not all has ended within {CLOSE_TIMEOUT_S} s")
        if self._leftovers:
            self._exit_hard(f"{reason}; its state was restored in part")
        self.ended.set_result(reason)

    def _await_restored(self, left: Callable[[], float]) -> bool:
        """Wait for the chains that are being built; return whether that has ended in time."""
        while self._restoring and left() > 0:
            with contextlib.suppress(queue.Empty):
                mail = self._mailbox.get(timeout=left())
                if isinstance(mail, (Restored, RestoreFailed)):
                    self._on_mail(mail)
        return not self._restoring

    def _take_reports(self) -> None:
        """Tell the driver what has been uploaded and committed at last."""
        with contextlib.suppress(queue.Empty):
            while True:
                mail = self._mailbox.get_nowait()
                if isinstance(mail, (Acked, Declined, CompletionHeard, SinkCommitted)):
                    self._on_report(mail)

    def _exit_hard(self, reason: str) -> None:
        """End this process now: its connections close, and servers roll back what was open."""
        self._context.scratch.delete()
        job, slot = self._context.plan.job, self._context.slot
        _log.warning("slot %d of job %s exits: %s", slot, job, reason)
        logging.shutdown()
        os._exit(1)
