"""The job driver: one attempt after another until the job is done or may not be tried again."""

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
from onceflow.core.json_logs import bind_thread_fields, to_slot_settings
from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind, StateForm
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.failures import EndJob, JobFailures
from onceflow.core.protocol.ids import committer_ref
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.loops.attempt_facts import (
    CancelRequested,
    CheckpointRequested,
    JobCancelled,
    Request,
    SlotsEnded,
)
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
from onceflow.core.runtime.events.job_events import (
    AttemptBegan,
    AttemptEnded,
    JobEnded,
    JobRestarting,
    JobStarted,
    JobState,
    StateDropped,
)
from onceflow.core.runtime.events.listeners import JobListener
from onceflow.core.runtime.events.status import JobStatus
from onceflow.core.runtime.messages import fingerprint_of
from onceflow.core.runtime.metrics.exposition import Measured
from onceflow.core.runtime.metrics.recent_latency import RecentLatency
from onceflow.core.runtime.slot.context import AttemptPlan
from onceflow.core.runtime.slot.program import Program, pickle_program
from onceflow.core.runtime.transport.control_plane import ControlServer
from onceflow.core.runtime.transport.credentials import (
    Credentials,
    TlsIdentity,
    draw_identities,
    identity_in,
    new_token,
)
from onceflow.core.settings.effective_settings import EffectiveSetting
from onceflow.core.settings.pipeline_settings import (
    TlsFiles,
)
from onceflow.core.spi import CommittedBy
from onceflow.core.storage import JobStorage

_log = logging.getLogger("onceflow.runtime.driver")


class JobDriver:
    """Owns a running job. `start` returns at once; the job runs on a thread of its own."""

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
        # Pickled on the caller's thread: what cannot be sent to slots is refused before a job
        # starts.
        self._program = pickle_program(Program(plan.graph, plan.backend))
        if isinstance(plan.settings.tls, TlsFiles):
            identity_in(plan.settings.tls)  # to see that it is there: each attempt reads it anew
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
        """When the attempt failed whose slots were then waited for."""
        self._cancelled_by_request = False
        self._owner = LogOwner(plan, self._storage, restore, self._tracker.publish)
        self._failures = JobFailures(plan.restart.tracker(random.Random()))  # noqa: S311 - jitter
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"job {plan.name}", daemon=True)

    def start(self) -> None:
        """Begin the first attempt."""
        sources = frozenset(uid for uid, _ in self._plan.graph.sources())
        self._tracker.publish(JobStarted(sources))
        if self._plan.settings.stop_on_signals:
            STOP_SIGNALS.add(self)
        self._thread.start()

    @property
    def name(self) -> str:
        """The job's name."""
        return self._plan.name

    @property
    def stop_timeout_s(self) -> float:
        """How long a stop by a signal may take."""
        return self._plan.settings.stop_timeout_s

    def stopping_on_signals(self) -> AbstractContextManager[None]:
        """Have SIGINT and SIGTERM stop the job meanwhile, unless it is set to leave them alone."""
        if self._plan.settings.stop_on_signals:
            return STOP_SIGNALS.handle(self._cluster.take_signals)
        return contextlib.nullcontext()

    def status(self) -> JobStatus:
        """Return the job as of now. Any thread."""
        return self._tracker.status

    def measure(self) -> Measured:
        """Return what the job has measured up to now. Any thread."""
        return self._observation.measure()

    def read_latencies(self) -> dict[str, RecentLatency]:
        """Return, by sink, how long records have lately taken to be visible. Any thread."""
        return self._observation.read_latencies()

    def judge_health(self) -> Health:
        """Return whether the job gets on, and whether it runs. Any thread."""
        return self._observation.judge_health()

    def add_listener(self, listener: JobListener) -> None:
        """Tell `listener` of every event from now on. Any thread."""
        self._tracker.add_listener(listener)

    def request(self, kind: CheckpointKind) -> None:
        """Ask for a checkpoint of `kind`. Any thread; returns at once."""
        self._events.put(CheckpointRequested(kind))

    def graph_view(self) -> GraphView:
        """Return the dataflow, as a page draws it. Any thread."""
        return describe_graph(self._plan.graph, self._plan.parallelism)

    def settings(self) -> Sequence[EffectiveSetting]:
        """Return every setting with its origin. Any thread."""
        return self._plan.shown_settings

    def prove_sinks(self) -> Mapping[str, Any]:
        """Read what the decision log and each target say now. Any thread; connects to targets.

        Raises:
            StorageError: The log cannot be read.
            CheckpointCorrupt: It is damaged.
        """
        return prove_sinks(self._plan.graph, self._storage)

    def describe_stored(self) -> Mapping[str, Any]:
        """Read which checkpoints and savepoints are in storage. Any thread; reads files.

        Raises:
            StorageError: They cannot be read.
            CheckpointCorrupt: The log, or a savepoint, is damaged.
        """
        return describe_stored(self._described, self._storage)

    def look_up(self, uid: str, state: str | None, keys: Sequence[Any]) -> StateAnswer:
        """Return what the last completed checkpoint holds under one key. Any thread; reads files.

        Raises:
            ConfigError: There is no such state, or no checkpoint yet.
            CheckpointCorrupt: A state file is damaged or missing.
        """
        return look_up(self._storage, uid, state, keys)

    def savepoint(
        self, kind: CheckpointKind, directory: str | None, form: StateForm = StateForm.CANONICAL
    ) -> AskedSavepoint:
        """Ask for a savepoint of `kind`. Any thread; returns at once.

        It is done, or fails with `SavepointFailed`, while the job goes on or by its end.

        Raises:
            ConfigError: `directory` is nowhere that the checkpoint storage can reach.
            StorageError: It cannot be written to; the job is left alone.
        """
        asked = self._savepoints.ask(kind, directory, form)
        self._events.put(asked.request)
        # The job may have ended between the two: then nobody takes the request from the queue.
        if self._ended.is_set():
            self._savepoints.fail_all("the job has ended")
        return asked

    def stop(self) -> None:
        """Ask to stop with a last checkpoint. Any thread; returns at once."""
        self.request(CheckpointKind.STOP)

    def cancel(self) -> None:
        """As `leave`, by the user's wish: checkpoints go, if they are set to."""
        self._cancelled_by_request = True
        self.leave()

    def leave(self) -> None:
        """Ask to leave without a checkpoint. Any thread; returns at once."""
        self._asked_to_leave.set()
        # The flag wakes a driver that waits for a restart, the event one that runs an attempt.
        self._events.put(CancelRequested())

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the job's end; return whether it came."""
        return self._ended.wait(timeout_s)

    @property
    def error(self) -> BaseException | None:
        """Why the job failed; None while it runs and when it ended well."""
        return self._error

    # --- the restart loop ---------------------------------------------------------------------

    def _main(self) -> None:
        bind_thread_fields(job=self._plan.name)
        try:
            finished = self._attempts()
            # Only now all that was decided is committed, and the savepoints may say so.
            self._savepoints.add_proofs()
            if finished:
                self._tell_sources()
            end = JobEnded(JobState.FINISHED if finished else JobState.STOPPED)
        except JobCancelled:
            end = self._finish_cancelled()
        except BaseException as error:  # the edge: the user sees it through the job handle
            self._error = error
            end = JobEnded(JobState.FAILED, _text_of(error))
            fields = {"error": type(error).__name__}
            _log.error("job %s failed: %s", self._plan.name, error, extra=fields)
        try:
            self._tracker.publish(end)
            self._tracker.close()
        finally:
            STOP_SIGNALS.remove(self)
            ended = self._tracker.status
            why = f": {ended.last_error}" if ended.state is JobState.FAILED else ""
            self._savepoints.fail_all(f"the job has {ended.state.value}{why}")
            self._recorder.end(ended.state, ended.attempt, ended.last_error)
            if self._endpoint is not None:
                self._endpoint.close()
            self._observation.hide()
            # Last: whoever waits for the end finds the status final and all savepoints answered.
            self._ended.set()

    def _finish_cancelled(self) -> JobEnded:
        """Delete the checkpoints if the settings say so; return how the job has ended.

        A job that is cancelled because its process ends keeps them.
        """
        deletes_checkpoints = (
            self._cancelled_by_request and self._plan.checkpointing.deletes_on_cancel()
        )
        log = self._owner.log
        if not deletes_checkpoints or log is None or not log.view.completed:
            return JobEnded(JobState.CANCELLED)
        self._observation.promise(math.inf)  # There may be many files to delete.
        try:
            # A new claim fails if another driver owns the job by now: these are its checkpoints
            # then.
            log = self._owner.claim()
            delete_checkpoints(log, self._owner.open_recovery(log), self._storage)
        except Exception as error:  # the job is cancelled all the same, and can go on
            text = f"its checkpoints are kept: {_text_of(error)}"
            _log.warning("job %s is cancelled; %s", self._plan.name, text)
            return JobEnded(JobState.CANCELLED, text)
        return JobEnded(JobState.CANCELLED)

    def _tell_sources(self) -> None:
        assert self._owner.log is not None
        last = self._owner.log.view.completed[-1]
        for uid, source in self._plan.graph.sources():
            try:
                source.on_finished(splits_of(last, uid) or ())
            except Exception as error:  # the job is over and well, whatever stays behind
                _log.warning("source %s could not clean up: %s", uid, error)

    def _end_with_process(self) -> None:
        """Cancel the job: it needs this process, whose main thread is at its end.

        Flight's threads that still called into the interpreter afterwards would abort the process,
        and Flight waits for the slots at the interpreter's end.
        """
        _log.warning("the process ends, and job %s with it: it is cancelled", self._plan.name)
        self.leave()
        self._ended.wait(3 * self._plan.settings.cancel_timeout_s)

    def _attempts(self) -> bool:
        while True:
            try:
                return self._attempt()
            except (Fenced, JobCancelled):
                raise
            except Exception as error:
                self._await_restart(error)

    def _await_restart(self, error: Exception) -> None:
        """Wait until the next attempt is due; raise `error`, or what explains it, if none is."""
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
                # Since the failure: a part has passed while the slots left.
                left_s = max(0.0, (self._failed_at or now) + delay_s - now)
                text = self._failures.describe(text, now)
                # The rest is a traceback, and the same one as often as it fails.
                fields = {"error": type(error).__name__, "cause": text}
                first_line = text.partition("\n")[0]
                _log.warning("restart in %.2f s: %s", left_s, first_line, extra=fields)
                self._tracker.publish(JobRestarting(left_s, text))
                self._observation.promise(left_s)
                if self._asked_to_leave.wait(left_s):
                    raise JobCancelled("cancelled while restarting") from error

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
        # After the targets were asked: a log that is behind its targets must decide nothing.
        view, max_parallelism = self._owner.find_restore_point(log)
        restored = view.completed[-1]
        self._observation.retain(view.completed)
        # After the claim: what older attempts have not decided by now they never will.
        self._owner.sweep_storage(log, view)
        self._tracker.publish(AttemptBegan(log.attempt, restored.checkpoint))
        changed = find_changed_operators(plan.graph, restored)
        if left := (*operators_left(plan.graph, restored), *changed):
            state = tuple(f"the state of operator {uid!r}" for uid in left)
            self._tracker.publish(StateDropped(state))
        token, (own_tls, slot_tls) = new_token(), self._tls()
        server = ControlServer(
            plan.settings.driver_host or self._cluster.driver_host,
            Credentials(token, own_tls),
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
        # Hooks run last registered first, and this one must run before those of Flight's servers.
        atexit.register(self._end_with_process)
        try:
            settings = context.plan.settings
            self._cluster.await_slots(context.plan.parallelism, settings.start_timeout_s)
            slots = self._cluster.start(
                context.plan,
                lambda error: self._events.put(SlotsEnded(context.plan.attempt, error)),
            )
            finished = attempt.run()
            self._tracker.publish(AttemptEnded(context.plan.attempt))
            return finished
        except BaseException as error:
            self._failed_at = time.monotonic()
            self._tracker.publish(AttemptEnded(context.plan.attempt, _text_of(error)))
            # Before the slots are waited for below: they leave by themselves only when they are
            # told.
            server.dismiss(f"attempt {context.plan.attempt} failed: {str(error)[:500]}")
            raise
        finally:
            # Each of eight parts may take `cancel_timeout_s` to end.
            self._observation.promise(8 * self._plan.settings.cancel_timeout_s)
            if slots is not None:
                self._end_slots(slots)
            # After the slots, whose last words it may still have to take, and before the server
            # goes.
            attempt.close()
            server.close(self._plan.settings.cancel_timeout_s)
            atexit.unregister(self._end_with_process)
            # Requests outlive attempts. Everything else in the queue is of slots that are gone.
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
        """Wait for the slots to leave; kill what does not."""
        if not slots.join(self._plan.settings.cancel_timeout_s):
            slots.kill()
            if not slots.join(self._plan.settings.cancel_timeout_s):
                _log.error("the slots of job %s did not end, though killed", self._plan.name)

    def _drain(self, unanswered: Sequence[Request]) -> None:
        """Drop what the ended attempt has left; ask the next one for what the user asked for."""
        kept: list[Request] = [*unanswered]
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, Request):
                    kept.append(event)
        for event in kept:
            self._events.put(event)

    def _tls(self) -> tuple[TlsIdentity | None, TlsIdentity | TlsFiles | None]:
        """Return what the driver shows, and what its slots are to show."""
        setting = self._plan.settings.tls
        match setting:
            case TlsFiles() as files:
                return identity_in(files), files
            case "on":
                return draw_identities()
            case "auto":
                return (None, None) if self._cluster.is_local else draw_identities()
            case "off":
                return None, None
            case _:
                assert_never(setting)


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
