"""The start of an attempt: claims the log, restores, and runs the slots to their end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import time
from collections.abc import Callable, Sequence

from typing_extensions import assert_never

from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.failures import JobFailures
from onceflow.core.protocol.ids import committer_ref
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.loops.attempt_facts import Request, SlotsEnded
from onceflow.core.runtime.cluster.cluster import RunningSlots
from onceflow.core.runtime.driver.attempt import Attempt
from onceflow.core.runtime.driver.attempt_context import AttemptContext
from onceflow.core.runtime.driver.job_context import JobContext
from onceflow.core.runtime.driver.log_owner import wall_ms
from onceflow.core.runtime.driver.restore import find_changed_operators, operators_left
from onceflow.core.runtime.events import job_events
from onceflow.core.runtime.json_logs import bind_thread_fields, to_slot_settings
from onceflow.core.runtime.slot.context import AttemptPlan
from onceflow.core.runtime.transport import credentials
from onceflow.core.runtime.transport.control_plane import ControlServer
from onceflow.core.settings.pipeline_settings import TlsFiles
from onceflow.core.spi import CommittedBy
from onceflow.core.storage import ClaimedLog

_log = logging.getLogger("onceflow.runtime.driver")


class AttemptStarter:
    """Starts the attempts of one job, one after another. Used by the job's thread."""

    def __init__(
        self,
        context: JobContext,
        failures: JobFailures,
        owned: Callable[[], None],
        end_with_process: Callable[[], None],
    ) -> None:
        """Start nothing yet; `owned` and `end_with_process` are as in `RestartLoop`."""
        self._context = context
        self._plan = context.plan
        self._cluster = context.cluster
        self._owner = context.owner
        self._observation = context.observation
        self._tracker = context.observation.tracker
        self._events = context.events
        self._failures = failures
        self._owned = owned
        self._end_with_process = end_with_process
        self.failed_at: float | None = None
        """The time at which the last attempt failed, before its slots had ended.

        None if it failed before it had slots.
        """

    def run(self) -> bool:
        """Run the next attempt to its end. Return True if the job has finished, False if stopped.

        Raises:
            Fenced: Another driver owns the job.
            JobCancelled: The job was cancelled.
            Exception: The attempt has failed.
        """
        self.failed_at = None
        self._failures.begin_attempt()
        self._observation.promise(self._plan.settings.start_timeout_s)
        self._cluster.check_alive()
        plan = self._plan
        log = self._owner.claim()
        bind_thread_fields(attempt=log.attempt)
        self._owned()
        for _, source in plan.graph.sources():
            source.validate()
        log = self._owner.agree_with_targets(log)
        # Only after the targets were queried: a log that is behind its targets must decide nothing.
        view, max_parallelism = self._owner.find_restore_point(log)
        restored = view.completed[-1]
        self._observation.retain(view.completed)
        # After the claim: older attempts can decide nothing any more, so their files can be
        # deleted.
        self._owner.sweep_storage(log, view)
        self._tracker.publish(job_events.AttemptBegan(log.attempt, restored.checkpoint))
        changed = find_changed_operators(plan.graph, restored)
        if left := (*operators_left(plan.graph, restored), *changed):
            state = tuple(f"the state of operator {uid!r}" for uid in left)
            self._tracker.publish(job_events.StateDropped(state))
        return self._run_restored(log, view, max_parallelism)

    def _run_restored(self, log: ClaimedLog, view: LogView, max_parallelism: int) -> bool:
        """Run the attempt that owns `log`, from the last decision of `view`, to its end."""
        plan, storage = self._plan, self._context.storage
        # Before the server opens: if storage fails here, no other code would close the server.
        probe = storage.probe_write(log.attempt)
        recovery = self._owner.open_recovery(log)
        token, (own_tls, slot_tls) = credentials.new_token(), self._tls()
        server = ControlServer(
            plan.settings.driver_host or self._cluster.driver_host,
            credentials.Credentials(token, own_tls),
            self._events.put,
        )
        attempt_plan = AttemptPlan(
            job=plan.name,
            attempt=log.attempt,
            parallelism=plan.parallelism,
            max_parallelism=max_parallelism,
            delivery=plan.checkpointing.delivery(),
            settings=plan.settings,
            allow_non_restored_state=plan.allow_non_restored_state,
            driver_address=server.address,
            token=token,
            tls=slot_tls,
            storage=self._context.checkpoint_storage,
            storage_token_path=probe.path,
            log_id=storage.log_id,
            loopback=self._cluster.is_local,
            logging=to_slot_settings(plan.logging),
        )
        context = AttemptContext(
            plan=attempt_plan,
            graph=plan.graph,
            program=self._context.program,
            log=log,
            storage=storage,
            storage_token=probe.token,
            recovery=recovery,
            restored=view.completed[-1],
            coordinator=lambda now_s: self._coordinator(attempt_plan, view, now_s),
            next_checkpoint=view.next_checkpoint,
            publish=self._tracker.publish,
            running=lambda: self._failures.on_running(time.monotonic()),
            savepoints=self._context.savepoints,
            promise=self._observation.promise,
            retain=self._take_completed,
        )
        return self._run_on_cluster(context, server)

    def _take_completed(self, retained: Sequence[CompletedCheckpoint]) -> None:
        self._failures.on_checkpoint()
        self._observation.retain(retained)

    def _run_on_cluster(self, context: AttemptContext, server: ControlServer) -> bool:
        slots: RunningSlots | None = None
        attempt = Attempt(context, self._events)
        # atexit hooks run in reverse order, and this hook must run before those of Flight's
        # servers.
        atexit.register(self._end_with_process)
        try:
            settings = context.plan.settings
            self._cluster.await_slots(context.plan.parallelism, settings.start_timeout_s)
            slots = self._cluster.start(
                context.plan,
                lambda error: self._events.put(SlotsEnded(context.plan.attempt, error)),
            )
            finished = attempt.run()
            self._tracker.publish(job_events.AttemptEnded(context.plan.attempt))
            return finished
        except BaseException as error:
            self.failed_at = time.monotonic()
            self._tracker.publish(
                job_events.AttemptEnded(context.plan.attempt, name_and_text_of(error))
            )
            # Dismiss the slots before waiting for them below: they end only when told to.
            server.dismiss(f"attempt {context.plan.attempt} failed: {str(error)[:500]}")
            raise
        finally:
            # Each of eight parts may take `cancel_timeout_s` to end.
            self._observation.promise(8 * self._plan.settings.cancel_timeout_s)
            if slots is not None:
                self._end_slots(slots)
            # Close after the slots have ended, because the attempt may still handle their last
            # messages, and before the server closes.
            attempt.close()
            server.close(self._plan.settings.cancel_timeout_s)
            atexit.unregister(self._end_with_process)
            # Keep requests for the next attempt. All other events in the queue are from ended
            # slots.
            self._drain(attempt.unanswered)
            self._context.savepoints.fail_begun(f"attempt {context.plan.attempt} has ended")

    def _coordinator(self, plan: AttemptPlan, view: LogView, now_s: float) -> CheckpointCoordinator:
        everyone, sources = self._plan.graph.subtasks(plan.parallelism)
        return CheckpointCoordinator(
            self._plan.checkpointing.settings(),
            attempt=plan.attempt,
            subtasks=everyone,
            sources=sources,
            parallelism=plan.parallelism,
            max_parallelism=plan.max_parallelism,
            retained=view.completed,
            next_checkpoint=view.next_checkpoint,
            now_s=now_s,
            wall_ms=wall_ms,
            makes_last_rows=self._plan.graph.makes_last_rows(),
            committers=frozenset(
                committer_ref(operator.uid)
                for operator, work in self._plan.graph.sinks()
                if work.sink.committed_by is CommittedBy.DRIVER
            ),
        )

    def _end_slots(self, slots: RunningSlots) -> None:
        """Wait for the slots to end; kill those that do not end in time."""
        if not slots.join(self._plan.settings.cancel_timeout_s):
            slots.kill()
            if not slots.join(self._plan.settings.cancel_timeout_s):
                _log.error(
                    "the slots of job %s did not end although they were killed", self._plan.name
                )

    def _drain(self, unanswered: Sequence[Request]) -> None:
        """Drop the ended attempt's events; keep the user's unanswered requests in the queue."""
        kept: list[Request] = [*unanswered]
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, Request):
                    kept.append(event)
        for event in kept:
            self._events.put(event)

    def _tls(
        self,
    ) -> tuple[credentials.TlsIdentity | None, credentials.TlsIdentity | TlsFiles | None]:
        """Return the TLS identity of the driver, and that of its slots."""
        setting = self._plan.settings.tls
        match setting:
            case TlsFiles() as files:
                return credentials.identity_in(files), files
            case "on":
                return credentials.draw_identities()
            case "auto":
                return (None, None) if self._cluster.is_local else credentials.draw_identities()
            case "off":
                return None, None
            case _:
                assert_never(setting)


def name_and_text_of(error: BaseException) -> str:
    """Return the class and the text of `error`, as the status shows them."""
    return f"{type(error).__name__}: {error}"
