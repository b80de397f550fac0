"""The job driver: the handle of a running job, whose methods any thread may call."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from onceflow.core.protocol.checkpoints.decisions import CheckpointKind, StateForm
from onceflow.core.protocol.loops.attempt_facts import CheckpointRequested
from onceflow.core.runtime.cluster.cluster import Cluster
from onceflow.core.runtime.driver import job_views
from onceflow.core.runtime.driver.endpoint import EndpointServer
from onceflow.core.runtime.driver.health import Health
from onceflow.core.runtime.driver.job_context import open_job
from onceflow.core.runtime.driver.job_plan import JobPlan
from onceflow.core.runtime.driver.observation import RunRecorder
from onceflow.core.runtime.driver.restart_loop import RestartLoop
from onceflow.core.runtime.driver.savepoints import AskedSavepoint
from onceflow.core.runtime.driver.state_lookup import StateAnswer, look_up
from onceflow.core.runtime.driver.stop_signals import STOP_SIGNALS
from onceflow.core.runtime.events.job_events import JobStarted, JobState
from onceflow.core.runtime.events.listeners import JobListener
from onceflow.core.runtime.events.status import JobStatus
from onceflow.core.runtime.json_logs import bind_thread_fields
from onceflow.core.runtime.metrics.commit_latency import RecentLatency
from onceflow.core.runtime.metrics.exposition import Measured
from onceflow.core.settings.effective_settings import EffectiveSetting

_log = logging.getLogger("onceflow.runtime.driver")


class JobDriver:
    """The driver of one job. `start` returns at once; the job runs on its own thread."""

    def __init__(self, cluster: Cluster, plan: JobPlan) -> None:
        """Check `plan` and start nothing yet.

        Raises:
            ConfigError: See `open_job`.
        """
        self._context = context = open_job(cluster, plan)
        self._plan = plan
        self._storage = context.storage
        self._savepoints = context.savepoints
        self._observation = context.observation
        self._tracker = context.observation.tracker
        self._recorder = RunRecorder(context.storage)
        endpoint, address = plan.endpoint, context.storage.driver_address
        self._endpoint = EndpointServer(endpoint, self, address) if endpoint else None
        self._restarts = RestartLoop(
            context, owned=self._show, end_with_process=self._end_with_process
        )
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
        """The time in seconds that a stop by a signal may take."""
        return self._plan.settings.stop_timeout_s

    def stopping_on_signals(self) -> AbstractContextManager[None]:
        """Stop the job on SIGINT and SIGTERM inside the context, unless the settings disable it."""
        if self._plan.settings.stop_on_signals:
            return STOP_SIGNALS.handle(self._context.cluster.take_signals)
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
        self._context.events.put(CheckpointRequested(kind))

    def graph_view(self) -> job_views.GraphView:
        """Return the dataflow as the web page draws it. Any thread."""
        return job_views.describe_graph(self._plan.graph, self._plan.parallelism)

    def settings(self) -> Sequence[EffectiveSetting]:
        """Return every setting with its origin. Any thread."""
        return self._plan.shown_settings

    def prove_sinks(self) -> Mapping[str, Any]:
        """Read the decision log and each target, and compare them. Any thread; connects to targets.

        Raises:
            StorageError: The log cannot be read.
            CheckpointCorrupt: The log is damaged.
        """
        return job_views.prove_sinks(self._plan.graph, self._storage)

    def describe_stored(self) -> Mapping[str, Any]:
        """Read the list of checkpoints and savepoints in storage. Any thread; reads files.

        Raises:
            StorageError: The checkpoints or savepoints cannot be read.
            CheckpointCorrupt: The log, or a savepoint, is damaged.
        """
        return job_views.describe_stored(self._context.checkpoint_storage, self._storage)

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
        self._context.events.put(asked.request)
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
        self._restarts.cancel()

    def leave(self) -> None:
        """Request an end without a checkpoint. Any thread; returns at once."""
        self._restarts.leave()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the job's end. Return True if the job ended within `timeout_s`."""
        return self._ended.wait(timeout_s)

    @property
    def error(self) -> BaseException | None:
        """The error that made the job fail.

        None while the job runs and if it ended without error.
        """
        return self._restarts.error

    # --- the job's thread -----------------------------------------------------------------------

    def _main(self) -> None:
        bind_thread_fields(job=self._plan.name)
        try:
            end = self._restarts.run()
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
            # Last, so that a caller that waits for the end finds a final status and all savepoints
            # answered.
            self._ended.set()

    def _show(self) -> None:
        """Show the job to other processes. Called when an attempt has claimed the log."""
        self._recorder.begin()
        if self._endpoint is not None:
            self._endpoint.serve()
        self._observation.show()

    def _end_with_process(self) -> None:
        """Cancel the job, because the process's main thread ends and the job needs the process.

        Otherwise Flight's threads would call into the ended interpreter and abort the process.
        Flight waits for the slots at the interpreter's end.
        """
        _log.warning("the process ends, so job %s is cancelled", self._plan.name)
        self.leave()
        self._ended.wait(3 * self._plan.settings.cancel_timeout_s)
