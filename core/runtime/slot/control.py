"""The owner of a slot's control stream: what the slot hears, what it says, and when it ends.

One thread with one mailbox. What the driver says, what the parts of the slot report and the time
reach it one after the other, so nothing here needs a lock. `protocol.loops.slot` decides what
follows, and this file carries the decisions out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from typing_extensions import assert_never

from onceflow.core.crash_points import reach
from onceflow.core.errors import SlotLost
from onceflow.core.protocol.checkpoints.decisions import NotifyAbort, TriggerCheckpoint
from onceflow.core.protocol.loops.slot import (
    BeginClosing,
    BeginRestore,
    BeginUpload,
    CloseParts,
    CommitDecided,
    EndSlot,
    ExitHard,
    NoteProgress,
    PartsClosed,
    Post,
    ReportFailure,
    RestoreEnded,
    SayClosed,
    Send,
    SendHeartbeat,
    SlotDecision,
    SlotFact,
    SlotLoop,
    StartSubtasks,
)
from onceflow.core.protocol.messages import (
    Acked,
    Complete,
    Deploy,
    GloballyCommitted,
    Heartbeat,
    Hello,
    OfferSplits,
    PartFailed,
    Running,
    Shutdown,
    SlotClosed,
    SlotMessage,
)
from onceflow.core.runtime.dataflow.channels import OutputChannel
from onceflow.core.runtime.dataflow.subtask import SnapshotTaken, SourceSubtask
from onceflow.core.runtime.messages import report_of_failure
from onceflow.core.runtime.slot.chain_builder import Chains
from onceflow.core.runtime.slot.context import SlotContext, rss_bytes
from onceflow.core.runtime.slot.snapshot_uploads import SnapshotUploads
from onceflow.core.runtime.transport.control_plane import ControlStream
from onceflow.core.runtime.transport.data_plane import DataServer, FlightChannel, KeepAlive

_log = logging.getLogger("onceflow.runtime.slot")


@dataclass(frozen=True, slots=True)
class Restored:
    """The chains are built and have their state."""

    chains: Chains


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """Some of the chains is missing, or lacks its state; what was built is never started."""

    error: BaseException
    channels: Sequence[OutputChannel]
    """Those that were opened. Peers wait for the end of each when they close."""


ControlMail: TypeAlias = Restored | RestoreFailed | SlotFact


class SlotControl:
    """Carries out what a slot does next. `run` is its thread; what else is called is of any."""

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
        self._channels: Sequence[OutputChannel] = ()
        self._keep_alive: KeepAlive | None = None
        self._heard_at = time.monotonic()
        self.deploy: Future[Deploy | None] = Future()
        """What to restore; None when the slot ends before it is told."""
        self.ended: Future[str] = Future()
        """Why the slot is closed."""
        self._stream = ControlStream(driver_address, context.credentials, hello, self._hear)
        self._loop = SlotLoop(
            self._settings.heartbeat_interval_s,
            self._settings.heartbeat_timeout_s,
            time.monotonic(),
        )

    def run(self) -> None:
        """Do what the driver says until it says `Shutdown`, or is gone."""
        try:
            while not self.ended.done():
                with contextlib.suppress(queue.Empty):
                    wait_s = self._loop.wait_s(time.monotonic())
                    self._take(self._mailbox.get(timeout=wait_s))
                # After every mail, and not only when none comes: a busy slot must send heartbeats,
                # too.
                self._carry_out(self._loop.tick(self._heard_at, time.monotonic()))
        except BaseException as error:
            # Nobody would close the parts any more, so only the end of the process stops them.
            _log.exception("slot %d failed", self._context.slot)
            self._carry_out(self._loop.on(PartFailed(error), time.monotonic()))
            self._exit_hard("its control failed")

    def _hear(self, mail: SlotFact) -> None:
        # On the thread that reads: a control that is busy for long does not take the driver for
        # silent.
        self._heard_at = time.monotonic()
        self._mailbox.put(mail)

    def _take(self, mail: ControlMail) -> None:
        """Do what follows from `mail`; what cannot be done, or said, fails the attempt."""
        match mail:
            case Restored(chains):
                self._chains, self._channels = chains, chains.channels
                self._tell(RestoreEnded())
            case RestoreFailed(error, channels):
                self._channels = channels
                self._tell(RestoreEnded(error, leaves_parts=True))
            case _:
                self._tell(mail)

    def _tell(self, fact: SlotFact) -> None:
        decisions = self._loop.on(fact, time.monotonic())
        try:
            self._carry_out(decisions)
        except Exception as error:
            # While closing there is no attempt left that could fail: `run` ends the process.
            if self._context.closing.is_set():
                raise
            self._carry_out(self._loop.on(PartFailed(error), time.monotonic()))

    def _carry_out(self, decisions: Iterable[SlotDecision]) -> None:
        for decision in decisions:
            self._do(decision)

    def _do(self, decision: SlotDecision) -> None:  # noqa: C901, PLR0912 - dispatches
        match decision:
            case BeginRestore(deploy):
                self.deploy.set_result(deploy)
            case StartSubtasks():
                self._start()
            case Post(mail):
                self._post(mail)
            case BeginUpload(frozen):
                assert isinstance(frozen, SnapshotTaken)
                self._uploads.begin(frozen)
            case Send(message):
                self._send(message)
                if isinstance(message, Acked):
                    _reach_acked(message)
            case CommitDecided(complete):
                refs = [subtask.ref for subtask in self._require_chains().subtasks]
                self._send(*self._require_chains().commits.commit_through(complete, refs))
            case NoteProgress(report):
                self._send(*self._require_chains().commits.record_progress(report))
            case GloballyCommitted():
                self._require_chains().commits.record_global_commit(decision)
            case ReportFailure(error):
                self._report_failure(error)
            case SendHeartbeat():
                self._send(self._heartbeat())
                if self._keep_alive:
                    self._keep_alive.check(time.monotonic())
            case BeginClosing():
                self._begin_closing()
            case CloseParts():
                self._close_parts(decision)
            case SayClosed(deadline_s):
                self._say_closed(deadline_s)
            case EndSlot(reason):
                self.ended.set_result(reason)
            case ExitHard(reason):
                self._exit_hard(reason)
            case _:
                assert_never(decision)

    def _require_chains(self) -> Chains:
        assert self._chains is not None, "nothing is restored"
        return self._chains

    def _post(
        self, mail: TriggerCheckpoint | OfferSplits | Complete | NotifyAbort | Shutdown
    ) -> None:
        for subtask in self._require_chains().subtasks:
            match mail:
                case TriggerCheckpoint():
                    is_for_it = isinstance(subtask, SourceSubtask)
                case OfferSplits(uid):
                    is_for_it = subtask.ref.chain == uid
                case Complete() | NotifyAbort() | Shutdown():
                    is_for_it = True
                case _:
                    assert_never(mail)
            if is_for_it:
                subtask.post(mail)

    def _start(self) -> None:
        chains = self._require_chains()
        for subtask in chains.subtasks:
            if self._context.closing.is_set():
                # The shutdown may have come while the state was restored. Subtasks start all the
                # same.
                subtask.post(Shutdown("the slot shuts down"))  # it closes its operators
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

    def _heartbeat(self) -> Heartbeat:
        slot, chains = self._context.slot, self._chains
        if chains is None:
            return Heartbeat(slot, rss_bytes=rss_bytes())
        subtasks = tuple(subtask.metrics() for subtask in chains.subtasks)
        waits = tuple(wait for subtask in chains.subtasks for wait in subtask.list_waits())
        return Heartbeat(slot, subtasks, rss_bytes(), chains.commits.metrics(), waits)

    def _send(self, *messages: SlotMessage) -> None:
        with contextlib.suppress(SlotLost):  # the stream's end is mail, too
            for message in messages:
                self._stream.send(message)

    def _report_failure(self, error: BaseException) -> None:
        """Tell the driver; a slot that cannot say what went wrong exits."""
        try:
            self._send(report_of_failure(self._context.slot, error))
        except BaseException as unsaid:
            self._exit_hard(f"{type(error).__name__} could not be reported: {unsaid!a}")

    # --- the end ------------------------------------------------------------------------------

    def _begin_closing(self) -> None:
        self._context.closing.set()
        if self._keep_alive:
            self._keep_alive.end()
        if not self.deploy.done():
            self.deploy.set_result(None)

    def _close_parts(self, close: CloseParts) -> None:
        left: Callable[[], float] = lambda: max(0.0, close.deadline_s - time.monotonic())  # noqa: E731
        ended = True
        # Channels first, which breaks a write that a subtask may hang in. Then the subtasks, which
        # give work to commits and uploads. Each part is closed, whatever became of the ones before:
        # `ended` stands on the right of `and`.
        for channel in self._channels:
            channel.close(close.reason)
        if chains := self._chains:
            self._post(Shutdown(close.reason))
            # `min` and not `all`, which would not wait for those behind the first that hangs.
            ended = min(subtask.join(left()) for subtask in chains.subtasks)
            ended = chains.commits.close(left) and ended
        ended = self._uploads.close(left()) and ended
        ended = self._data_server.close(left()) and ended
        # What has been uploaded and committed at last.
        with contextlib.suppress(queue.Empty):
            while True:
                mail = self._mailbox.get_nowait()
                if not isinstance(mail, (Restored, RestoreFailed)):
                    self._tell(mail)
        self._tell(PartsClosed(ended))

    def _say_closed(self, deadline_s: float) -> None:
        self._context.scratch.delete()
        # The counters of a short job must not end with whatever the last beat happened to see.
        self._send(self._heartbeat(), SlotClosed())
        # A second at least, also past the deadline: the driver takes a slot without a last word for
        # lost.
        self._stream.close(max(1.0, deadline_s - time.monotonic()))

    def _exit_hard(self, reason: str) -> None:
        """End this process now: its connections close, and servers roll back what was open."""
        self._context.scratch.delete()
        job, slot = self._context.plan.job, self._context.slot
        _log.warning("slot %d of job %s exits: %s", slot, job, reason)
        logging.shutdown()
        # No destructors and exit hooks, which may wait for the very threads that hang.
        os._exit(1)


def _reach_acked(acked: Acked) -> None:
    if any(operator.committables for operator in acked.snapshot.operators):
        reach("acked")
