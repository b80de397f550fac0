"""The job driver: runs one attempt after another until the job ends or no restart is allowed."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import queue
import random
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import assert_never

from onceflow.core.errors import Fenced, OnceflowError
from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind, StateForm
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.failures import EndJob, JobFailures
from onceflow.core.protocol.ids import committer_ref
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.loops import attempt_facts
from onceflow.core.protocol.restart import GiveUp, RestartAfter
from onceflow.core.runtime.cluster.cluster import Cluster, RunningSlots
from onceflow.core.runtime.driver.attempt import Attempt
from onceflow.core.runtime.driver.attempt_context import AttemptContext, AttemptEvent
from onceflow.core.runtime.driver.checkpoint_deletion import delete_checkpoints
from onceflow.core.runtime.driver.endpoint import EndpointServer
from onceflow.core.runtime.driver.health import Health
from onceflow.core.runtime.driver.job_plan import JobPlan
from onceflow.core.runtime.driver.job_views import (
    GraphView,
    describe_graph,
    describe_stored,
    prove_sinks,
)
from onceflow.core.runtime.driver.log_owner import LogOwner, wall_ms
from onceflow.core.runtime.driver.observation import Observation
from onceflow.core.runtime.driver.restore import (
    find_changed_operators,
    operators_left,
)
from onceflow.core.runtime.driver.run_recorder import RunRecorder
from onceflow.core.runtime.driver.savepoint_restore import SavepointRestore
from onceflow.core.runtime.driver.savepoints import AskedSavepoint, Savepoints
from onceflow.core.runtime.driver.source_splits import splits_of
from onceflow.core.runtime.driver.state_lookup import StateAnswer, look_up
from onceflow.core.runtime.driver.stop_signals import STOP_SIGNALS
from onceflow.core.runtime.events import job_events
from onceflow.core.runtime.events.listeners import JobListener
from onceflow.core.runtime.events.status import JobStatus
from onceflow.core.runtime.json_logs import bind_thread_fields, to_slot_settings
from onceflow.core.runtime.messages import fingerprint_of
from onceflow.core.runtime.metrics.exposition import Measured
from onceflow.core.runtime.metrics.recent_latency import RecentLatency
from onceflow.core.runtime.slot.context import AttemptPlan
from onceflow.core.runtime.slot.program import Program, pickle_program
from onceflow.core.runtime.transport import credentials
from onceflow.core.runtime.transport.control_plane import ControlServer
from onceflow.core.settings.effective_settings import EffectiveSetting
from onceflow.core.settings.pipeline_settings import (
    TlsFiles,
)
from onceflow.core.spi import CommittedBy
from onceflow.core.storage import JobStorage

_log = logging.getLogger("onceflow.runtime.driver")


class JobDriver:
    """The driver of one job. `start` returns at once; the job runs on its own thread."""

    def __init__(self, cluster: Cluster, plan: JobPlan) -> None:
        self._cluster = cluster
        self._plan = plan
        self._observation = Observation(
            plan.name,
            plan.graph,
            plan.listeners,
            plan.checkpointing.settings(),
            plan.settings,
            plan.metrics,
            plan.logging,
            plan.telemetry,
        )
        # Pickle on the caller's thread: a program that cannot be pickled is refused before the job
        # starts.
        self._program = pickle_program(Program(plan.graph, plan.backend))
        if isinstance(plan.settings.tls, TlsFiles):
            credentials.identity_in(
                plan.settings.tls
            )  # to see that it is there: each attempt reads it anew
        cluster.check(plan.parallelism)
        self._described = plan.checkpointing.checkpoint_storage()
        self._storage: JobStorage = self._described.open(plan.name)
        self._savepoints = Savepoints(
            plan.name,
            self._described,
            self._storage,
            plan.checkpointing.savepoints,
            plan.backend.native_form,
            plan.checkpointing.settings().timeout_s,
        )
        restore = (
            None
            if plan.restore is None
            else SavepointRestore(
                plan.restore, self._described, self._storage, plan.backend.native_form
            )
        )
        self._recorder = RunRecorder(self._storage)
        self._tracker = self._observation.tracker
        endpoint, address = plan.endpoint, self._storage.driver_address
        self._endpoint = EndpointServer(endpoint, self, address) if endpoint else None
        self._events: queue.SimpleQueue[AttemptEvent] = queue.SimpleQueue()
        self._asked_to_leave = threading.Event()
        self._failed_at: float | None = None
        """The time at which the last attempt failed, before the driver waited for its slots
        to end."""
        self._cancelled_by_request = False
        self._owner = LogOwner(plan, self._storage, restore, self._tracker.publish)
        self._failures = JobFailures(plan.restart.tracker(random.Random()))  # noqa: S311 - jitter
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"job {plan.name}", daemon=True)

    def start(self) -> None:
        """Begin the first attempt."""
        sources = frozenset(uid for uid, _ in self._plan.graph.sources())
        self._tracker.publish(job_events.JobStarted(sources))
        if self._plan.settings.stop_on_signals:
            STOP_SIGNALS.add(self)
        self._thread.start()

    @property
    def name(self) -> str:
        """The job's name."""
        return self._plan.name

    @property
    def stop_timeout_s(self) -> float:
        """The time in seconds that a stop by a signal may take."""
        return self._plan.settings.stop_timeout_s

    def stopping_on_signals(self) -> AbstractContextManager[None]:
        """Stop the job on SIGINT and SIGTERM inside the context, unless the settings disable it."""
        if self._plan.settings.stop_on_signals:
            return STOP_SIGNALS.handle(self._cluster.take_signals)
        return contextlib.nullcontext()

    def status(self) -> JobStatus:
        """Return the status of the job now. Any thread."""
        return self._tracker.status

    def measure(self) -> Measured:
        """Return the job's metrics up to now. Any thread."""
        return self._observation.measure()

    def read_latencies(self) -> dict[str, RecentLatency]:
        """Return, by sink, the recent latency until records became visible. Any thread."""
        return self._observation.read_latencies()

    def judge_health(self) -> Health:
        """Return the job's health: whether it makes progress, and whether it runs. Any thread."""
        return self._observation.judge_health()

    def add_listener(self, listener: JobListener) -> None:
        """Pass every event from now on to `listener`. Any thread."""
        self._tracker.add_listener(listener)

    def request(self, kind: CheckpointKind) -> None:
        """Request a checkpoint of `kind`. Any thread; returns at once."""
        self._events.put(attempt_facts.CheckpointRequested(kind))

    def graph_view(self) -> GraphView:
        """Return the dataflow as the web page draws it. Any thread."""
        return describe_graph(self._plan.graph, self._plan.parallelism)

    def settings(self) -> Sequence[EffectiveSetting]:
        """Return every setting with its origin. Any thread."""
        return self._plan.shown_settings

    def prove_sinks(self) -> Mapping[str, Any]:
        """Read the decision log and each target, and compare them. Any thread; connects to targets.

        Raises:
            StorageError: The log cannot be read.
            CheckpointCorrupt: The log is damaged.
        """
        return prove_sinks(self._plan.graph, self._storage)

    def describe_stored(self) -> Mapping[str, Any]:
        """Read the list of checkpoints and savepoints in storage. Any thread; reads files.

        Raises:
            StorageError: The checkpoints or savepoints cannot be read.
            CheckpointCorrupt: The log, or a savepoint, is damaged.
        """
        return describe_stored(self._described, self._storage)

    def look_up(self, uid: str, state: str | None, keys: Sequence[Any]) -> StateAnswer:
        """Return the value of one key in the last completed checkpoint. Any thread; reads files.

        Raises:
            ConfigError: There is no such state, or no checkpoint yet.
            CheckpointCorrupt: A state file is damaged or missing.
        """
        return look_up(self._storage, uid, state, keys)

    def savepoint(
        self, kind: CheckpointKind, directory: str | None, form: StateForm = StateForm.CANONICAL
    ) -> AskedSavepoint:
        """Request a savepoint of `kind`. Any thread; returns at once.

        The savepoint completes, or fails with `SavepointFailed`, at the latest when the job ends.

        Raises:
            ConfigError: The checkpoint storage cannot reach `directory`.
            StorageError: `directory` cannot be written to; the job is not affected.
        """
        asked = self._savepoints.ask(kind, directory, form)
        self._events.put(asked.request)
        # The job may have ended between the two lines. No attempt then takes the request.
        if self._ended.is_set():
            self._savepoints.fail_all("the job has ended")
        return asked

    def stop(self) -> None:
        """Request a stop with a last checkpoint. Any thread; returns at once."""
        self.request(CheckpointKind.STOP)

    def cancel(self) -> None:
        """Cancel the job by the user's wish.

        Like `leave`, but deletes checkpoints if so configured.
        """
        self._cancelled_by_request = True
        self.leave()

    def leave(self) -> None:
        """Request an end without a checkpoint. Any thread; returns at once."""
        self._asked_to_leave.set()
        # The flag wakes a driver that waits for a restart, the event wakes a running attempt.
        self._events.put(attempt_facts.CancelRequested())

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the job's end. Return True if the job ended within `timeout_s`."""
        return self._ended.wait(timeout_s)

    @property
    def error(self) -> BaseException | None:
        """The error that made the job fail.

        None while the job runs and if it ended without error.
        """
        return self._error

    # --- the restart loop ---------------------------------------------------------------------

    def _main(self) -> None:
        bind_thread_fields(job=self._plan.name)
        try:
            finished = self._attempts()
            # All decided transactions are committed now, so savepoints can store the proofs.
            self._savepoints.add_proofs()
            if finished:
                self._tell_sources()
            end = job_events.JobEnded(
                job_events.JobState.FINISHED if finished else job_events.JobState.STOPPED
            )
        except attempt_facts.JobCancelled:
            end = self._finish_cancelled()
        except BaseException as error:  # the edge: the user sees it through the job handle
            self._error = error
            end = job_events.JobEnded(job_events.JobState.FAILED, _text_of(error))
            fields = {"error": type(error).__name__}
            _log.error("job %s failed: %s", self._plan.name, error, extra=fields)
        try:
            self._tracker.publish(end)
            self._tracker.close()
        finally:
            STOP_SIGNALS.remove(self)
            ended = self._tracker.status
            why = f": {ended.last_error}" if ended.state is job_events.JobState.FAILED else ""
            self._savepoints.fail_all(f"the job has {ended.state.value}{why}")
            self._recorder.end(ended.state, ended.attempt, ended.last_error)
            if self._endpoint is not None:
                self._endpoint.close()
            self._observation.hide()
            # Last, so that a caller that waits for the end finds a final status and all savepoints
            # answered.
            self._ended.set()

    def _finish_cancelled(self) -> job_events.JobEnded:
        """Delete the checkpoints if the settings say so; return the JobEnded event.

        A job that is cancelled because its process ends keeps its checkpoints.
        """
        deletes_checkpoints = (
            self._cancelled_by_request and self._plan.checkpointing.deletes_on_cancel()
        )
        log = self._owner.log
        if not deletes_checkpoints or log is None or not log.view.completed:
            return job_events.JobEnded(job_events.JobState.CANCELLED)
        self._observation.promise(math.inf)  # There may be many files to delete.
        try:
            # The new claim fails if another driver owns the job by now: the checkpoints then belong
            # to that driver.
            log = self._owner.claim()
            delete_checkpoints(log, self._owner.open_recovery(log), self._storage)
        except Exception as error:  # the job is cancelled all the same, and can go on
            text = f"its checkpoints are kept: {_text_of(error)}"
            _log.warning("job %s is cancelled; %s", self._plan.name, text)
            return job_events.JobEnded(job_events.JobState.CANCELLED, text)
        return job_events.JobEnded(job_events.JobState.CANCELLED)

    def _tell_sources(self) -> None:
        assert self._owner.log is not None
        last = self._owner.log.view.completed[-1]
        for uid, source in self._plan.graph.sources():
            try:
                source.on_finished(splits_of(last, uid) or ())
            except Exception as error:  # the job is over and well, whatever stays behind
                _log.warning("source %s could not clean up: %s", uid, error)

    def _end_with_process(self) -> None:
        """Cancel the job, because the process's main thread ends and the job needs the process.

        Otherwise Flight's threads would call into the ended interpreter and abort the process.
        Flight waits for the slots at the interpreter's end.
        """
        _log.warning("the process ends, and job %s with it: it is cancelled", self._plan.name)
        self.leave()
        self._ended.wait(3 * self._plan.settings.cancel_timeout_s)

    def _attempts(self) -> bool:
        while True:
            try:
                return self._attempt()
            except (Fenced, attempt_facts.JobCancelled):
                raise
            except Exception as error:
                self._await_restart(error)

    def _await_restart(self, error: Exception) -> None:
        """Wait until the next attempt is due.

        If no restart is allowed, raise `error` or its cause.
        """
        self._owner.check_owned()
        if not isinstance(error, OnceflowError):
            self._cluster.check_alive()
        now, text = time.monotonic(), _text_of(error)
        match self._failures.on_failure(error, text, fingerprint_of(error), now):
            case EndJob():
                raise error
            case GiveUp(reason):
                self._cluster.check_alive()
                if not isinstance(error, OnceflowError):
                    _log.error("no further restart of job %s: %s", self._plan.name, reason)
                    raise error
                first_line, line_end, trace = self._failures.describe(text, now).partition("\n")
                text = f"{first_line} (no further restart: {reason}){line_end}{trace}"
                raise type(error)(text.removeprefix(f"{type(error).__name__}: ")) from error
            case RestartAfter(delay_s):
                self._cluster.check_alive()
                # Count from the failure: part of the delay has passed while the slots ended.
                left_s = max(0.0, (self._failed_at or now) + delay_s - now)
                text = self._failures.describe(text, now)
                # The other lines are a traceback, which is the same each time the attempt fails.
                fields = {"error": type(error).__name__, "cause": text}
                first_line = text.partition("\n")[0]
                _log.warning("restart in %.2f s: %s", left_s, first_line, extra=fields)
                self._tracker.publish(job_events.JobRestarting(left_s, text))
                self._observation.promise(left_s)
                if self._asked_to_leave.wait(left_s):
                    raise attempt_facts.JobCancelled("cancelled while restarting") from error

    def _attempt(self) -> bool:
        self._failed_at = None
        self._failures.begin_attempt()
        self._observation.promise(self._plan.settings.start_timeout_s)
        self._cluster.check_alive()
        plan, storage = self._plan, self._storage
        log = self._owner.claim()
        bind_thread_fields(attempt=log.attempt)
        self._recorder.begin()
        if self._endpoint is not None:
            self._endpoint.serve()
        self._observation.show()
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
        token, (own_tls, slot_tls) = credentials.new_token(), self._tls()
        server = ControlServer(
            plan.settings.driver_host or self._cluster.driver_host,
            credentials.Credentials(token, own_tls),
            self._events.put,
        )
        probe = storage.probe_write(log.attempt)
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
            storage=self._described,
            storage_token_path=probe.path,
            log_id=storage.log_id,
            loopback=self._cluster.is_local,
            logging=to_slot_settings(plan.logging),
        )
        recovery = self._owner.open_recovery(log)
        context = AttemptContext(
            plan=attempt_plan,
            graph=plan.graph,
            program=self._program,
            log=log,
            storage=storage,
            storage_token=probe.token,
            recovery=recovery,
            restored=restored,
            coordinator=lambda now_s: self._coordinator(attempt_plan, view, now_s),
            next_checkpoint=view.next_checkpoint,
            publish=self._tracker.publish,
            running=lambda: self._failures.on_running(time.monotonic()),
            savepoints=self._savepoints,
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
                lambda error: self._events.put(
                    attempt_facts.SlotsEnded(context.plan.attempt, error)
                ),
            )
            finished = attempt.run()
            self._tracker.publish(job_events.AttemptEnded(context.plan.attempt))
            return finished
        except BaseException as error:
            self._failed_at = time.monotonic()
            self._tracker.publish(job_events.AttemptEnded(context.plan.attempt, _text_of(error)))
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
            self._savepoints.fail_begun(f"attempt {context.plan.attempt} has ended")

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
                _log.error("the slots of job %s did not end, though killed", self._plan.name)

    def _drain(self, unanswered: Sequence[attempt_facts.Request]) -> None:
        """Drop the ended attempt's events; keep the user's unanswered requests in the queue."""
        kept: list[attempt_facts.Request] = [*unanswered]
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, attempt_facts.Request):
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


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
