"""The owner of a slot's control stream: handles messages, sends reports, and ends the slot.

It has one thread with one mailbox. Messages of the driver, reports of the slot's parts and timeouts
are handled one after the other, so no locks are needed. `protocol.loops.slot` decides what follows,
and this module carries out its decisions.
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
from onceflow.core.protocol.checkpoints.decisions import Barrier, NotifyAbort
from onceflow.core.protocol.loops.slot import (
    BeginClosing,
    CloseParts,
    EndSlot,
    ExitHard,
    PartsClosed,
    RestoreEnded,
    SayClosed,
    SendHeartbeat,
    SlotDecision,
    SlotFact,
    SlotLoop,
    SnapshotFrozen,
    StartSubtasks,
)
from onceflow.core.protocol.messages import (
    Acked,
    Complete,
    CompletionHeard,
    Declined,
    Deploy,
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
    """The report that the chains are built and have their state."""

    chains: Chains


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """The report that the chains could not be built or restored. Built parts are never started."""

    error: BaseException
    channels: Sequence[OutputChannel]
    """The opened channels. When a peer closes, it waits for the end of each of them."""


ControlMail: TypeAlias = Restored | RestoreFailed | SlotFact


class SlotControl:
    """Carries out a slot's decisions. `run` is its thread; any thread may call other methods."""

    def __init__(
        self,
        context: SlotContext,
        mailbox: queue.SimpleQueue[ControlMail],
        data_server: DataServer,
        driver_address: str,
        hello: Hello,
    ) -> None:
        """Connect to the driver.

        Raises:
            SlotLost: The driver cannot be reached or refuses the slot.
        """
        self._context = context
        self._trace = context.trace
        self._settings = context.plan.settings
        self._mailbox = mailbox
        self._data_server = data_server
        self._uploads = SnapshotUploads(context)
        self._chains: Chains | None = None
        self._channels: Sequence[OutputChannel] = ()
        self._keep_alive: KeepAlive | None = None
        self._heard_at = time.monotonic()
        self.deploy: Future[Deploy | None] = Future()
        """The state to restore; None if the slot ends before it is deployed."""
        self.ended: Future[str] = Future()
        """The reason why the slot is closed."""
        self._stream = ControlStream(driver_address, context.credentials, hello, self._hear)
        self._loop = SlotLoop(
            self._settings.heartbeat_interval_s,
            self._settings.heartbeat_timeout_s,
            time.monotonic(),
        )

    def run(self) -> None:
        """Handle the driver's messages until `Shutdown`, or until the driver is lost."""
        try:
            while not self.ended.done():
                with contextlib.suppress(queue.Empty):
                    wait_s = self._loop.wait_s(time.monotonic())
                    self._take(self._mailbox.get(timeout=wait_s))
                # After every message, not only when idle: a busy slot must send heartbeats, too.
                self._carry_out(self._loop.tick(self._heard_at, time.monotonic()))
        except BaseException as error:
            # No other code would close the parts now, so only the end of the process stops them.
            _log.exception("slot %d failed", self._context.slot)
            self._carry_out(self._loop.on(PartFailed(error), time.monotonic()))
            self._exit_hard("its control failed")

    def _hear(self, mail: SlotFact) -> None:
        # On the reading thread: if the control is busy for long, the driver must not look
        # silent.
        self._heard_at = time.monotonic()
        self._mailbox.put(mail)

    def _take(self, mail: ControlMail) -> None:
        """Handle `mail`. An action or message that fails makes the attempt fail."""
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
            case Deploy(_, checkpoint):
                self._trace.record("restored", checkpoint=checkpoint)
                self.deploy.set_result(decision)
            case StartSubtasks():
                self._start()
            case Barrier() | OfferSplits() | NotifyAbort():
                self._post(decision)
            case Complete(checkpoint):
                self._trace.record("heard", checkpoint=checkpoint)
                self._post(decision)
                refs = [subtask.ref for subtask in self._require_chains().subtasks]
                self._send(*self._require_chains().commits.commit_through(decision, refs))
            case GloballyCommitted():
                self._require_chains().commits.record_global_commit(decision)
            case SnapshotFrozen():
                assert isinstance(decision, SnapshotTaken)
                self._uploads.begin(decision)
            case Acked():
                self._record_ack(decision)
                self._send(decision)
                _reach_acked(decision)
            case Declined() | SourceExhausted():
                self._send(decision)
            case CompletionHeard() | SinkCommitted():
                self._send(*self._require_chains().commits.record_progress(decision))
            case PartFailed(error):
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

    def _post(self, mail: Barrier | OfferSplits | Complete | NotifyAbort | Shutdown) -> None:
        for subtask in self._require_chains().subtasks:
            match mail:
                case Barrier():
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
                # If the shutdown came while the state was restored, subtasks still start, so that
                # each closes its operators.
                subtask.post(Shutdown("the slot shuts down"))  # it closes its operators
            subtask.start()
        if self._context.closing.is_set():
            return
        self._keep_alive = KeepAlive(
            [channel for channel in chains.channels if isinstance(channel, FlightChannel)],
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

    def _record_ack(self, acked: Acked) -> None:
        operators = acked.snapshot.operators
        self._trace.record(
            "acked",
            checkpoint=acked.checkpoint,
            subtask=str(acked.snapshot.subtask),
            listed=(c.transaction for operator in operators for c in operator.committables),
        )

    def _report_failure(self, error: BaseException) -> None:
        """Report the failure to the driver. If that is impossible, exit."""
        try:
            self._send(report_of_failure(self._context.slot, error))
        except BaseException as unsaid:
            self._exit_hard(
                f"{type(error).__name__} could not be reported to the driver: {unsaid!a}"
            )

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
        # Channels first, which unblocks a subtask's write that hangs. Then the subtasks, which
        # give work to commits and uploads. `ended` is the right operand of `and`, so that each part
        # is closed even if an earlier one failed to end.
        for channel in self._channels:
            channel.close(close.reason)
        if chains := self._chains:
            self._post(Shutdown(close.reason))
            # `min` instead of `all`, which would not wait for subtasks after the first that hangs.
            ended = min(subtask.join(left()) for subtask in chains.subtasks)
            ended = chains.commits.close(left) and ended
        ended = self._uploads.close(left()) and ended
        ended = self._data_server.close(left()) and ended
        # Send the acks and reports of the last uploads and commits.
        with contextlib.suppress(queue.Empty):
            while True:
                mail = self._mailbox.get_nowait()
                if not isinstance(mail, (Restored, RestoreFailed)):
                    self._tell(mail)
        self._tell(PartsClosed(ended))

    def _say_closed(self, deadline_s: float) -> None:
        self._context.scratch.delete()
        # A last heartbeat, so that the counters of a short job are complete.
        self._send(self._heartbeat(), SlotClosed())
        # Wait at least a second, even past the deadline: the driver takes a slot without a
        # last message for lost.
        self._stream.close(max(1.0, deadline_s - time.monotonic()))

    def _exit_hard(self, reason: str) -> None:
        """End this process now. Its connections close, and servers roll back open transactions."""
        self._context.scratch.delete()
        job, slot = self._context.plan.job, self._context.slot
        _log.warning("slot %d of job %s exits: %s", slot, job, reason)
        logging.shutdown()
        # Skip destructors and exit hooks, which may wait for the threads that hang.
        os._exit(1)


def _reach_acked(acked: Acked) -> None:
    if any(operator.committables for operator in acked.snapshot.operators):
        reach("acked")
