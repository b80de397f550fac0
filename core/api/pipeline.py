"""The pipeline, which is the entry point of the API, and the handle of a started job."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Literal, cast

from onceflow.core.api.reading import read_stream, read_streams
from onceflow.core.api.stream import Stream
from onceflow.core.api.users_mistakes import without_internal_frames
from onceflow.core.argument_types import check_arguments, check_fields
from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.plan.dataframe_source import DataFrameSource, is_dataframe
from onceflow.core.plan.event_time import WatermarkStrategy
from onceflow.core.plan.graph import NAME, GraphBuilder
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind, StateForm
from onceflow.core.protocol.ids import PARALLELISM_MAX
from onceflow.core.protocol.restart import RestartStrategy
from onceflow.core.protocol.splits import default_max_parallelism
from onceflow.core.runtime.cluster.cluster import Cluster
from onceflow.core.runtime.cluster.local_processes import LocalProcesses
from onceflow.core.runtime.driver.driver import JobDriver
from onceflow.core.runtime.driver.job_checks import check_job
from onceflow.core.runtime.driver.job_plan import JobPlan
from onceflow.core.runtime.driver.job_views import GraphView, describe_graph
from onceflow.core.runtime.driver.savepoint_restore import RestoreFrom
from onceflow.core.runtime.driver.state_lookup import StateAnswer
from onceflow.core.runtime.events.job_events import JobState
from onceflow.core.runtime.events.listeners import JobListener
from onceflow.core.runtime.events.status import JobStatus
from onceflow.core.setting_values import choice_of
from onceflow.core.settings import pipeline_settings
from onceflow.core.settings.configuration import Configuration
from onceflow.core.settings.effective_settings import EffectiveSetting, list_effective
from onceflow.core.spi import Sink, Source
from onceflow.core.spi.connector import Finding
from onceflow.core.state import StateBackend
from onceflow.core.storage import CheckpointStorage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession


class Job:
    """A started pipeline. The job ends with the process, but not when the handle is dropped.

    If the main thread ends while the job runs, the job is cancelled as by `cancel`. So call `wait`.

    If the process of a job is lost, start the same pipeline again with the same name and checkpoint
    storage, in this or another process. The job then continues, exactly once.
    """

    def __init__(self, driver: JobDriver) -> None:
        self._driver = driver

    def status(self) -> JobStatus:
        """Return the current status of the job, without waiting."""
        return self._driver.status()

    def add_listener(self, listener: JobListener) -> None:
        """Call `listener(event, status)` for each event from now on, with the status at the event.

        Each listener runs on the driver, on its own thread. Exceptions of a listener are logged and
        ignored. The job does not wait for listeners. If more than 1,000 events are queued for a
        listener, events are dropped, and `EventsDropped` has their number. `JobEnded` is not
        dropped: `wait` returns after the listener has processed it, or after 5 s.
        """
        self._driver.add_listener(listener)

    def checkpoint(self) -> None:
        """Request a checkpoint, without waiting for it. If it fails, another one follows."""
        self._driver.request(CheckpointKind.MANUAL)

    @check_arguments
    def savepoint(
        self,
        path: str | None = None,
        timeout_s: float | None = None,
        *,
        form: Literal["canonical", "native"] = "canonical",
    ) -> str:
        """Take a savepoint. Return its new directory when it is completely durable.

        The savepoint belongs to the user: the job does not refer to it, no checkpoint replaces it,
        and it may be moved. It commits nothing, and the job continues. Concurrent requests are
        processed one after the other. `path` is the parent directory of the savepoint (default:
        that of `Checkpointing`). `form="native"` is faster to write and restore, but only the same
        state backend can restore it.

        Raises:
            ConfigError: The checkpoint storage cannot reach `path`.
            StorageError: `path` is not writable.
            SavepointFailed: A subtask could not take part, the job restarted or ended, or the state
                could not be written. The job continues if it can.
            TimeoutError: The savepoint was not complete after `timeout_s`. It may still complete.
        """
        asked = self._driver.savepoint(
            CheckpointKind.SAVEPOINT, path, choice_of(StateForm, form, setting="form")
        )
        return _result(asked.done, timeout_s)

    def look_up(self, uid: str, key: object, *, state: str | None = None) -> StateAnswer:
        """Return the state of operator `uid` for `key` in the last completed checkpoint.

        `key` is the value of the key column, or a tuple if there are several key columns. `state`
        is the name of the state; it may be omitted if the operator has only one. Reads the
        checkpoint's files, so the running job is not affected. The answer names the checkpoint. Use
        it for a few keys. To read all keys as a DataFrame, use
        `spark.read.format("onceflow-state")`.

        Raises:
            ConfigError: There is no such operator or state (the message has similar names), there
                is no checkpoint yet, or the files that may contain the key have more than 256 MB.
            CheckpointCorrupt: A state file is damaged or missing.
        """
        return self._driver.look_up(uid, state, [key])

    @check_arguments
    def stop(
        self,
        timeout_s: float | None = 60.0,
        *,
        savepoint: bool | str = False,
        drain: bool = False,
        form: Literal["canonical", "native"] = "canonical",
    ) -> JobStatus:
        """Stop reading, take a last checkpoint, commit all transactions, and end the job.

        When `stop` returns, every record that was read is committed, and a later start continues
        with the next record. If the last checkpoint fails, another one is taken, after a restart if
        necessary.

        With `savepoint` (True, or its parent directory) a savepoint is taken first, and no record
        is read after it. Its path is `JobStatus.savepoints[-1].place`. If it fails, the job
        restarts and continues. With `drain`, sources also end like bounded sources before the
        savepoint is taken. `form` is as in `savepoint`.

        Raises:
            ConfigError: `drain` without `savepoint`.
            SavepointFailed: The savepoint failed, and the job has restarted.
            TimeoutError: The job had not ended after `timeout_s`. It is still stopping.
            OnceflowError: The job failed while it stopped.
        """
        if not savepoint:
            if drain:
                raise ConfigError("stop(drain=True) ends the sources: take savepoint=True with it")
            self._driver.stop()
            return self.wait(timeout_s)
        kind = CheckpointKind.SAVEPOINT_DRAIN if drain else CheckpointKind.SAVEPOINT_STOP
        began = time.monotonic()
        directory = savepoint if isinstance(savepoint, str) else None
        asked = self._driver.savepoint(kind, directory, choice_of(StateForm, form, setting="form"))
        location = _result(asked.done, timeout_s)
        # Both waits share one timeout: the wait for the job's end gets the remaining time.
        left_s = None if timeout_s is None else max(0.0, timeout_s - time.monotonic() + began)
        try:
            return self.wait(left_s)
        except OnceflowError as error:
            raise type(error)(f"{error} (savepoint {location} was taken before)") from error

    def cancel(self, timeout_s: float | None = 60.0) -> JobStatus:
        """End without a checkpoint. A later start repeats from the last one, exactly once."""
        self._driver.cancel()
        return self.wait(timeout_s)

    @without_internal_frames
    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until the job has ended: its input is committed, or it was stopped or cancelled.

        While the main thread waits here, SIGINT and SIGTERM stop the job like `stop`, and the call
        returns its status. See `stopping_on_signals`.

        Raises:
            TimeoutError: The job had not ended after `timeout_s`.
            OnceflowError: The job failed, and its restart strategy allows no further attempt.
        """
        with self.stopping_on_signals():
            ended = self._driver.wait(timeout_s)
        if not ended:
            status = self.status()
            raise TimeoutError(
                f"job {status.job!r} is {status.state.value} after {timeout_s} s; last error:"
                f" {status.last_error or 'none'}{status.describe_refusals()}"
            )
        if self._driver.error is not None:
            raise self._driver.error
        return self.status()

    def wait_for(
        self,
        *,
        checkpoints: int = 0,
        records: int = 0,
        state: JobState = JobState.RUNNING,
        timeout_s: float = 120.0,
    ) -> JobStatus:
        """Wait until the job is in `state` and has the given progress. Return its status.

        For tests, and for programs that act at a certain moment. `checkpoints` is the number of
        checkpoints completed since `start`. `records` is the number of records that all sources
        have read in the current attempt.

        Raises:
            TimeoutError: The job had not got there after `timeout_s`. The message has its status.
            OnceflowError: The job ended before. If the job failed, its error is raised.
        """
        goal = f"{checkpoints} checkpoints and {records} records in state {state.value}"
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if (
                status.state is state
                and status.checkpoints_completed >= checkpoints
                and status.records_in >= records
            ):
                return status
            if status.state.ended:
                error = self._driver.error
                raise (
                    error
                    if error is not None
                    else OnceflowError(f"job {status.job!r} ended before it had {goal}: {status}")
                )
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"job {status.job!r} had not {goal} after {timeout_s:g} s: {status}"
                )
            self._driver.wait(0.02)

    def stopping_on_signals(self) -> AbstractContextManager[None]:
        """Return a context manager in which SIGINT and SIGTERM stop all jobs of this process.

        `wait`, `stop` and `cancel` already do this. Use it in a program that does something else
        while its job runs. The first signal requests a last checkpoint. Jobs that have not stopped
        after `RuntimeSettings.stop_timeout_s` are cancelled. A further signal, a second or more
        later, cancels at once. The context manager does nothing outside the main thread, if the
        program has set its own signal handler, or with `RuntimeSettings(stop_on_signals=False)`.
        """
        return self._driver.stopping_on_signals()

    @property
    def state(self) -> JobState:
        """The current state of the job."""
        return self.status().state


@dataclass(frozen=True, slots=True)
class PipelineDescription:
    """A description of a pipeline as it would start, for people and tools."""

    name: str
    graph: GraphView
    settings: tuple[EffectiveSetting, ...]
    storage: CheckpointStorage
    sources: Mapping[str, Source]
    """The sources by uid."""
    sinks: Mapping[str, Sink]
    """The sinks by uid, including those for dead letters."""


@check_fields
class Pipeline:
    """A dataflow that a program builds operator by operator and starts on `cluster`.

    `cluster` is a Spark session, a Spark Connect session, or `LocalProcesses()` for tests and small
    jobs on one machine. `name` is the identity of the job: it names its checkpoints and
    transactions. `parallelism` is the number of slots. Each slot is one Spark task or one local
    process for as long as the job runs. `max_parallelism` (the number of key groups) is fixed by
    the first checkpoint. `restart` sets how often and how soon a new attempt follows a failed one.
    By default the job restarts without limit, after 0.1 s at first and 5 s at most. The exception:
    if a function fails on the same record in the same way for the third time, the job fails.

    `retired_sinks` are, by sink id, sinks that the job once wrote to and no longer writes to. At
    the start, the job commits their decided transactions and rolls back the others. It does so
    again after the first checkpoint, and then forgets these sinks. If a job has written under a
    sink id and is started without this sink and without such an entry, the start fails. None in
    place of a sink leaves its prepared transactions as they are. Use it if the target no longer
    exists, or after `onceflow txn` has completed all transactions. An id that the job no longer
    remembers is ignored, so an entry may stay.

    With `allow_non_restored_state`, state in the restored checkpoint that the pipeline does not use
    (a state of another name or type, an aggregate, an operator) is dropped, logged and listed in
    `JobStatus.dropped_state`. All other state is kept. Without it, a start that would drop state
    fails.

    `listeners` get every event of the job from its start on. See `Job.add_listener`.

    `endpoint` is the address at which the driver answers `onceflow status`, `savepoint`, `stop` and
    other commands while it owns the job, or None for no endpoint. `metrics` is an additional
    address at which Prometheus finds the job's metrics.

    Settings that are not given here come from `config`: a file of settings or a loaded
    `Configuration`. By default they come from the file that ONCEFLOW_CONFIG names, and from the
    environment. `state_backend` may be a name.
    """

    def __init__(
        self,
        cluster: SparkSession | ConnectSession | LocalProcesses,
        *,
        name: str,
        checkpointing: pipeline_settings.Checkpointing | None = None,
        parallelism: int | None = None,
        max_parallelism: int | None = None,
        state_backend: StateBackend | str | None = None,
        restart: RestartStrategy | None = None,
        settings: pipeline_settings.RuntimeSettings | None = None,
        retired_sinks: Mapping[str, Sink | None] | None = None,
        allow_non_restored_state: bool | None = None,
        listeners: Sequence[JobListener] = (),
        endpoint: pipeline_settings.Endpoint | Literal["loopback"] | None = "loopback",
        metrics: pipeline_settings.Metrics | None = None,
        config: Configuration | str | PathLike[str] | None = None,
    ) -> None:
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"name={name!r}: use 1-64 letters, digits, '-' and '_', beginning with a letter"
                " or digit; checkpoints and transactions are named after it"
            )
        configured = config if isinstance(config, Configuration) else Configuration.load(config)
        self.name = name
        """The identity of the job."""
        self.cluster = cluster
        """The cluster that runs the slots."""
        self._configured = configured
        self._graph = GraphBuilder(name)
        self._plan = JobPlan(
            name=name,
            graph=self._graph.graph(),
            parallelism=configured.parallelism(parallelism),
            max_parallelism=configured.max_parallelism(max_parallelism),
            checkpointing=configured.checkpointing(checkpointing),
            backend=configured.state_backend(state_backend),
            restart=configured.restart(restart),
            settings=configured.runtime_settings(settings),
            retired_sinks=dict(retired_sinks or {}),
            allow_non_restored_state=configured.allow_non_restored_state(allow_non_restored_state),
            listeners=tuple(listeners),
            endpoint=(
                configured.endpoint()
                if endpoint == "loopback"
                else configured.resolve_endpoint(endpoint)
            ),
            metrics=configured.metrics(metrics),
            logging=configured.logging(),
            telemetry=configured.telemetry(),
            # The program's own values, so that `onceflow` shows the origin of each setting.
            shown_settings=list_effective(
                configured,
                checkpointing,
                settings,
                {
                    "pipeline.parallelism": parallelism,
                    "pipeline.max_parallelism": max_parallelism,
                    "pipeline.allow_non_restored_state": allow_non_restored_state,
                    "state_backend": state_backend,
                    "restart": restart,
                    "endpoint": _explicit_endpoint(endpoint),
                    "metrics": metrics,
                },
            ),
        )
        """The plan of each start. It gets its graph when the graph is complete."""
        _check_parallelism(self._plan.parallelism, self._plan.max_parallelism)

    @check_arguments
    def read(
        self,
        source: Source | DataFrame,
        *,
        uid: str,
        dead_letters: Sink | None = None,
        watermarks: WatermarkStrategy | None = None,
    ) -> Stream:
        """Return a stream of the records of `source`. `uid` names its position in checkpoints.

        A bounded Spark DataFrame is evaluated once in the life of the job, at its first start, into
        files in the checkpoint storage. All attempts and later starts read these files. They are
        deleted when the job has finished. Spark's executors need access to the storage, too.

        If a source is set to emit bad records (`KafkaSource(on_bad_record="dead_letter")`), it
        needs the sink `dead_letters`. This sink gets them as rows of `DEAD_LETTERS`, exactly once.

        `watermarks` names the column of event time. Event-time timers and windows need it.

        Raises:
            ConfigError: The uid is in use, only one of the source's setting and `dead_letters` is
                given, the source has several outputs (see `read_outputs`), the DataFrame is a
                stream, or it has a column that Arrow batches do not support.
        """
        if is_dataframe(source):
            source = DataFrameSource.of(
                source, self._plan.checkpointing.checkpoint_storage(), self.name, uid
            )
        source = source.bind(self.name, uid)
        return read_stream(self._graph, source, uid, dead_letters, watermarks)

    @check_arguments
    def read_outputs(
        self,
        source: Source,
        *,
        uid: str,
        dead_letters: Sink | None = None,
        watermarks: Mapping[str, WatermarkStrategy] | None = None,
    ) -> Mapping[str, Stream]:
        """Return the streams of a source that has several outputs, by the name of the output.

        `uid` names the source's position in checkpoints. One position covers all outputs. So rows
        of a transaction that changed several tables are committed in the same checkpoint. Records
        of an output that the job does not use are read and dropped. A later version of the job may
        use other outputs. It gets their records from the job's position on.

        `dead_letters` is as in `read`.

        `watermarks` names the column of event time for some outputs or for all. The source has one
        watermark, which all its streams carry: the lowest of the outputs in `watermarks`. An output
        without new records delays it for the others, unless its strategy has `idle_after`.

        Raises:
            ConfigError: The uid is in use, the source has only one stream, `watermarks` names an
                output that does not exist, or only one of the source's setting for bad records and
                `dead_letters` is given.
        """
        source = source.bind(self.name, uid)
        return read_streams(self._graph, source, uid, dead_letters, watermarks)

    @without_internal_frames
    @check_arguments
    def start(
        self,
        *,
        from_savepoint: str | None = None,
        claim: bool = False,
        allow_non_restored_state: bool | None = None,
        allow_rewind: bool = False,
    ) -> Job:
        """Start the job, from its last completed checkpoint if it has one. Return its handle.

        `from_savepoint` is the directory of a savepoint to start from, or a retained checkpoint:
        its number, or `<storage>/<job>/chk-<number>`. The state is copied. With `claim`, the
        savepoint is deleted after the job has started from it. If the job has started from this
        savepoint before, it continues from its last checkpoint, so the same start can be repeated.
        If the job has committed more since the savepoint, the start fails with a list of it, unless
        `allow_rewind` permits that those rows are written again. `Job.wait` raises this refusal,
        and the error if the savepoint's files cannot be used. `allow_non_restored_state` is as in
        `Pipeline`, for this start only.

        Raises:
            ConfigError: The graph is incomplete or the cluster cannot host it.
        """
        if from_savepoint is None:
            from_savepoint, claim = self._configured.savepoint(), claim or self._configured.claims()
        if from_savepoint is None and (claim or allow_rewind):
            raise ConfigError("claim and allow_rewind need from_savepoint, which is missing")
        plan = self._complete_plan()
        # Load once for each start, before the plan is pickled, so that all slots and attempts of
        # this start join with the same rows.
        for table in plan.graph.tables():
            table.load()
        if from_savepoint is not None:
            restore = RestoreFrom(from_savepoint, claim=claim, allow_rewind=allow_rewind)
            plan = replace(plan, restore=restore)
        if allow_non_restored_state is not None:
            plan = replace(plan, allow_non_restored_state=allow_non_restored_state)
        driver = JobDriver(_to_cluster(self.cluster), plan)
        driver.start()
        return Job(driver)

    def validate(self) -> tuple[Finding, ...]:
        """Run the checks that `start` runs before it changes anything. Return the findings.

        Checks that sources can be read, that sinks can be written, that the cluster has the slots,
        and from which checkpoint the job would continue. Creates, claims and starts nothing, so a
        running job of the same name is not disturbed. A finding of level `PROBLEM` would make the
        start fail.

        Raises:
            ConfigError: The graph is incomplete, or a sink is both written and retired.
        """
        return check_job(_to_cluster(self.cluster), self._complete_plan())

    def describe(self) -> PipelineDescription:
        """Return the operators, their connections, and every setting with its origin.

        Raises:
            ConfigError: The graph is incomplete, or a sink is both written and retired.
        """
        plan = self._complete_plan()
        return PipelineDescription(
            plan.name,
            describe_graph(plan.graph, plan.parallelism),
            plan.shown_settings,
            plan.checkpointing.checkpoint_storage(),
            dict(plan.graph.sources()),
            {operator.uid: work.sink for operator, work in plan.graph.sinks()},
        )

    def _complete_plan(self) -> JobPlan:
        """Return the plan with the graph that the program has built.

        Raises:
            ConfigError: The graph is incomplete, or a sink is both written and retired.
        """
        graph = self._graph.graph()
        graph.check_complete()
        for operator, work in graph.sinks():
            if work.sink_id in self._plan.retired_sinks:
                raise ConfigError(
                    f"{operator.uid!r} writes under sink id {work.sink_id!r}, which is in"
                    " retired_sinks: omit it there"
                )
        return replace(self._plan, graph=graph)

    @without_internal_frames
    def run(self, timeout_s: float | None = None) -> JobStatus:
        """Start the job and wait for its end. SIGINT and SIGTERM stop it. See `Job.wait`."""
        return self.start().wait(timeout_s)


def _explicit_endpoint(
    endpoint: pipeline_settings.Endpoint | Literal["loopback"] | None,
) -> pipeline_settings.Endpoint | Literal["none"] | None:
    """Return the endpoint that the program has set; None if it uses the default."""
    if endpoint == "loopback":
        return None
    return "none" if endpoint is None else endpoint


def _check_parallelism(parallelism: int, max_parallelism: int | None) -> None:
    """Raise ConfigError if there are fewer key groups than slots, or a number is out of range."""
    groups = max_parallelism or default_max_parallelism(max(parallelism, 1))
    if not 1 <= parallelism <= groups <= PARALLELISM_MAX:
        raise ConfigError(
            f"parallelism={parallelism} must be at least 1 and at most max_parallelism={groups},"
            f" and that at most {PARALLELISM_MAX}"
        )


def _result(asked: Future[str], timeout_s: float | None) -> str:
    try:
        return asked.result(timeout_s)
    except futures.TimeoutError:
        raise TimeoutError(
            f"the savepoint is not done after {timeout_s} s; it may still complete"
        ) from None


def _to_cluster(cluster: SparkSession | ConnectSession | LocalProcesses) -> Cluster:
    """Return the runtime's cluster for `cluster`. Imports Spark only if it is used."""
    if isinstance(cluster, LocalProcesses):
        return cluster
    # Compare the module's name: importing the classes of Spark Connect needs grpc, which a plain
    # Spark installation lacks.
    if type(cluster).__module__.startswith("pyspark.sql.connect."):
        from onceflow.core.runtime.cluster.spark_connect import SparkConnectCluster

        return SparkConnectCluster(cast("ConnectSession", cluster))
    from onceflow.core.runtime.cluster.spark import SparkCluster

    return SparkCluster(cast("SparkSession", cluster))
