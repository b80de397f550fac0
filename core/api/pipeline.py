"""The pipeline: where a user begins, and the handle of the job that it becomes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Literal, cast

from onceflow.core.api.dataframe_source import DataFrameSource, is_dataframe
from onceflow.core.api.event_time import WatermarkStrategy
from onceflow.core.api.graph import NAME, Feed, Graph, GraphBuilder, ReadFrom
from onceflow.core.api.stream import Stream
from onceflow.core.api.users_mistakes import without_internal_frames
from onceflow.core.errors import ConfigError, OnceflowError
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
from onceflow.core.settings.configuration import Configuration
from onceflow.core.settings.effective_settings import EffectiveSetting, list_effective
from onceflow.core.settings.pipeline_settings import (
    Checkpointing,
    Endpoint,
    Metrics,
    RuntimeSettings,
)
from onceflow.core.spi import Sink, Source
from onceflow.core.spi.connector import Finding
from onceflow.core.state import StateBackend
from onceflow.core.storage import CheckpointStorage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession


class Job:
    """A started pipeline. Losing the handle does not end the job; the end of the process does.

    When the main thread ends while the job runs, it is cancelled as by `cancel`: wait for it.

    A job that lost its process goes on, exactly once, when the same pipeline is started again under
    the same name and checkpoint storage, in this or any other process.
    """

    def __init__(self, driver: JobDriver) -> None:
        self._driver = driver

    def status(self) -> JobStatus:
        """Return the job as of now; never waits."""
        return self._driver.status()

    def add_listener(self, listener: JobListener) -> None:
        """Call `listener(event, status)` with each event from now on, and the status as of it.

        Runs on the driver, on a thread of the listener's own. What it raises is logged and stops
        nothing. One that is so slow that 1,000 events wait for it misses some, and is told how many
        by `EventsDropped`; the job never waits for it. `JobEnded` is never missed: `wait` returns
        when the listener has taken it, or after 5 s.
        """
        self._driver.add_listener(listener)

    def checkpoint(self) -> None:
        """Ask for a checkpoint now; returns at once. One that fails is followed by another."""
        self._driver.request(CheckpointKind.MANUAL)

    def savepoint(
        self,
        path: str | None = None,
        timeout_s: float | None = None,
        *,
        form: Literal["canonical", "native"] = "canonical",
    ) -> str:
        """Take a savepoint; return its directory, which is new, once all of it is durable.

        It is yours: nothing of the job names it, no checkpoint replaces it, and it may be moved. It
        commits nothing and the job goes on; savepoints that are asked for at once are taken one
        after the other. `path` is the directory to make it in; default: as `Checkpointing` says.
        `form` "native" is written and restored faster, and by the same state backend alone.

        Raises:
            ConfigError: `path` is nowhere that the checkpoint storage can reach.
            StorageError: `path` cannot be written to.
            SavepointFailed: A subtask could not take part, the job restarted or ended, or the state
                could not be written. The job goes on if it can.
            TimeoutError: It was not done after `timeout_s`; it may still be.
        """
        asked = self._driver.savepoint(
            CheckpointKind.SAVEPOINT, path, choice_of(StateForm, form, setting="form")
        )
        return _result(asked.done, timeout_s)

    def look_up(self, uid: str, key: object, *, state: str | None = None) -> StateAnswer:
        """Return what operator `uid` holds under `key`, as of the last completed checkpoint.

        `key` is the value of the key column, or a tuple of several; `state` the state's name, where
        the operator has several. Reads the checkpoint's files, so the job does not feel it, and the
        answer says which checkpoint it is of. For a few keys: all of them are a DataFrame, by
        `spark.read.format("onceflow-state")`.

        Raises:
            ConfigError: No such operator or state, with the nearest names; no checkpoint yet; or
                the files that may hold the key have more than 256 MB.
            CheckpointCorrupt: A state file is damaged or missing.
        """
        return self._driver.look_up(uid, state, [key])

    def stop(
        self,
        timeout_s: float | None = 60.0,
        *,
        savepoint: bool | str = False,
        drain: bool = False,
        form: Literal["canonical", "native"] = "canonical",
    ) -> JobStatus:
        """Stop reading, take a last checkpoint, commit everything, and end.

        When it returns, every record that was read is committed, and a later start goes on with the
        next one. A last checkpoint that fails is followed by another, also after a restart.

        With `savepoint` (True, or the directory to make it in) a savepoint is taken first, with
        nothing read after it: `JobStatus.savepoints[-1].place`. If it fails, the job restarts and
        goes on. With `drain` besides, sources end as bounded ones do before the savepoint is taken.
        `form` is as in `savepoint`.

        Raises:
            ConfigError: `drain` without `savepoint`.
            SavepointFailed: The savepoint was not taken; the job has restarted.
            TimeoutError: The job had not ended after `timeout_s`; it is still stopping.
            OnceflowError: The job failed instead.
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
        # One timeout for both waits: the end of the job gets what the savepoint has left.
        left_s = None if timeout_s is None else max(0.0, timeout_s - time.monotonic() + began)
        try:
            return self.wait(left_s)
        except OnceflowError as error:
            raise type(error)(f"{error} (savepoint {location} was taken before)") from error

    def cancel(self, timeout_s: float | None = 60.0) -> JobStatus:
        """End without a checkpoint: a later start repeats from the last one, exactly once."""
        self._driver.cancel()
        return self.wait(timeout_s)

    @without_internal_frames
    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until the job has ended: all input committed, or stopped, or cancelled.

        While the main thread waits here, SIGINT and SIGTERM stop the job as `stop` does, and the
        call returns its status; see `stopping_on_signals`.

        Raises:
            TimeoutError: It had not after `timeout_s`.
            OnceflowError: It failed, and its restart strategy allows no further attempt.
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
        """Wait until the job stands in `state` and has come as far as is asked; return its status.

        For tests, and for programs that act at a certain moment. `checkpoints` are those completed
        since `start`, `records` those read by all sources in the present attempt.

        Raises:
            TimeoutError: It had not after `timeout_s`; says where it stands.
            OnceflowError: The job ended before. If it failed, this is its error.
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
        """Return what makes SIGINT and SIGTERM stop all jobs of this process while it is entered.

        `wait`, `stop` and `cancel` do it by themselves; this is for a program that does something
        else while its job runs. The first signal asks for a last checkpoint, and cancels what has
        not stopped after `RuntimeSettings.stop_timeout_s`. Another one, a second or more later,
        cancels. Does nothing off the main thread, where the program has set a handler of its own,
        or with `RuntimeSettings(stop_on_signals=False)`.
        """
        return self._driver.stopping_on_signals()

    @property
    def state(self) -> JobState:
        """Where the job stands."""
        return self.status().state


@dataclass(frozen=True, slots=True)
class PipelineDescription:
    """A pipeline as it would start: for people, and for tools that look at it."""

    name: str
    graph: GraphView
    settings: tuple[EffectiveSetting, ...]
    storage: CheckpointStorage
    sources: Mapping[str, Source]
    """By uid."""
    sinks: Mapping[str, Sink]
    """All sinks by uid, those for dead letters among them."""


class Pipeline:
    """Describes a dataflow, operator by operator, and starts it on `cluster`.

    `cluster` is a Spark session, also one of Spark Connect; or `LocalProcesses()`, for tests and
    small jobs on one machine.
    `name` is the job's identity: its checkpoints and its transactions go by it. `parallelism` is
    the number of slots, each one Spark task, or one local process, for as long as the job runs.
    `max_parallelism` (the number of key groups) is fixed with the first checkpoint. `restart` says
    how often and how soon a failed attempt is followed by another; default: for ever, after 0.1 s
    at first, 5 s at most, but not when a function fails on the same record in the same way for the
    third time.

    `retired_sinks` are sinks that the job once wrote to and writes to no more, by sink id: at the
    start everything that was decided for them is committed and the rest rolled back, again after
    the first checkpoint, and then the job forgets them. A job that has written under a sink id and
    is started without it is refused otherwise. None in place of a sink leaves what is in doubt as
    it is: for a target that is gone, or after `onceflow txn` has settled all. An id that the job no
    longer remembers is ignored, so an entry may stay.

    With `allow_non_restored_state` what the restored checkpoint holds and the pipeline does not
    take (a state of another name or type, an aggregate, an operator) is dropped, logged and listed
    in `JobStatus.dropped_state`; all else is kept. A job that would drop any is refused otherwise.

    `listeners` are told of every event of the job from its start on; see `Job.add_listener`.

    `endpoint` says where the driver answers `onceflow status`, `savepoint`, `stop` and the like,
    for as long as it owns the job; None: nowhere. `metrics` says where Prometheus finds the job's
    metrics besides.

    What is left open is as `config` says, a file of settings or a loaded `Configuration`; default:
    the file that ONCEFLOW_CONFIG names, and the environment. `state_backend` may be a name.
    """

    def __init__(
        self,
        cluster: SparkSession | ConnectSession | LocalProcesses,
        *,
        name: str,
        checkpointing: Checkpointing | None = None,
        parallelism: int | None = None,
        max_parallelism: int | None = None,
        state_backend: StateBackend | str | None = None,
        restart: RestartStrategy | None = None,
        settings: RuntimeSettings | None = None,
        retired_sinks: Mapping[str, Sink | None] | None = None,
        allow_non_restored_state: bool | None = None,
        listeners: Sequence[JobListener] = (),
        endpoint: Endpoint | Literal["loopback"] | None = "loopback",
        metrics: Metrics | None = None,
        config: Configuration | str | PathLike[str] | None = None,
    ) -> None:
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"name={name!r}: use 1-64 letters, digits, '-' and '_', beginning with a letter or"
                " digit; checkpoints and transactions go by it"
            )
        configured = config if isinstance(config, Configuration) else Configuration.load(config)
        # What the program itself has said, before a file or the environment fills the rest:
        # `onceflow` shows where each setting comes from.
        asked_parallelism, asked_max_parallelism = parallelism, max_parallelism
        asked_endpoint = endpoint if isinstance(endpoint, Endpoint) else None
        parallelism = configured.parallelism(parallelism)
        max_parallelism = configured.max_parallelism(max_parallelism)
        _check_parallelism(parallelism, max_parallelism)
        self._shown_settings = list_effective(
            configured,
            checkpointing,
            settings,
            {
                "pipeline.parallelism": asked_parallelism,
                "pipeline.max_parallelism": asked_max_parallelism,
                "pipeline.allow_non_restored_state": allow_non_restored_state,
                "state_backend": state_backend,
                "restart": restart,
                "endpoint": "none" if endpoint is None else asked_endpoint,
                "metrics": metrics,
            },
        )
        self.name = name
        """The job's identity."""
        self.cluster = cluster
        """Where its slots run."""
        self._parallelism = parallelism
        self._max_parallelism = max_parallelism
        self._configured = configured
        self._checkpointing = configured.checkpointing(checkpointing)
        self._backend = configured.state_backend(state_backend)
        self._restart = configured.restart(restart)
        self._settings = configured.runtime_settings(settings)
        self._retired_sinks = dict(retired_sinks or {})
        self._allow_non_restored_state = configured.allow_non_restored_state(
            allow_non_restored_state
        )
        self._listeners = tuple(listeners)
        self._endpoint = (
            configured.endpoint()
            if endpoint == "loopback"
            else configured.resolve_endpoint(endpoint)
        )
        self._metrics = configured.metrics(metrics)
        self._graph = GraphBuilder(name)

    def read(
        self,
        source: Source | DataFrame,
        *,
        uid: str,
        dead_letters: Sink | None = None,
        watermarks: WatermarkStrategy | None = None,
    ) -> Stream:
        """Begin a stream with the records of `source`; `uid` names its position in checkpoints.

        A bounded Spark DataFrame is evaluated once in the job's life, when it first starts, into
        files of the checkpoint storage. All attempts and later starts read these; they are deleted
        when the job has finished. Spark's executors must see the storage, too.

        A source that is told to hand out bad records (`KafkaSource(on_bad_record="dead_letter")`)
        needs the sink `dead_letters`, which gets them as rows of `DEAD_LETTERS`, exactly once.

        `watermarks` says where the records' event time is, by which timers in event time go.

        Raises:
            ConfigError: The uid is in use, or only one of source and `dead_letters` is set so; or
                the DataFrame is a stream or has a column that Arrow batches do not take.
        """
        if is_dataframe(source):
            source = DataFrameSource.of(
                source, self._checkpointing.checkpoint_storage(), self.name, uid
            )
        if source.has_dead_letters != (dead_letters is not None):
            raise ConfigError(
                f"read(uid={uid!r}): on_bad_record='dead_letter' of the source and dead_letters="
                "<the sink that takes them> go together; one of them is missing"
            )
        if watermarks is not None:
            watermarks.check(source.schema)
        operator = self._graph.add(
            ReadFrom(source, watermarks), verb="read", uid=uid, schema=source.schema
        )
        if dead_letters is not None:
            self._graph.add_dead_letters(operator, dead_letters)
        return Stream(self._graph, Feed(uid, source.schema))

    @without_internal_frames
    def start(
        self,
        *,
        from_savepoint: str | None = None,
        claim: bool = False,
        allow_non_restored_state: bool | None = None,
        allow_rewind: bool = False,
    ) -> Job:
        """Start the job, from its last completed checkpoint if it has one; return its handle.

        `from_savepoint` is the directory of a savepoint to begin from instead, or a retained
        checkpoint: its number, or `<storage>/<job>/chk-<number>`. Its state is copied;
        with `claim` the savepoint is deleted once the job has begun from it. A job that has begun
        from it before goes on from its last checkpoint, so a start may be repeated as it is. One
        that has committed more since is refused, and says what, unless `allow_rewind` says that
        those rows may be written again. What is refused, and why a savepoint's files cannot be
        used, is raised by `Job.wait`. `allow_non_restored_state`: as in `Pipeline`, for this start.

        Raises:
            ConfigError: The graph is incomplete or the cluster cannot host it.
        """
        if from_savepoint is None:
            from_savepoint, claim = self._configured.savepoint(), claim or self._configured.claims()
        if from_savepoint is None and (claim or allow_rewind):
            raise ConfigError("claim and allow_rewind are about from_savepoint, which is missing")
        graph = self._complete_graph()
        # Once a start, and before the plan is pickled: all slots and all attempts of this start
        # join with the same rows.
        for table in graph.tables():
            table.load()
        plan = self._make_plan(
            graph,
            None
            if from_savepoint is None
            else RestoreFrom(from_savepoint, claim=claim, allow_rewind=allow_rewind),
            allow_non_restored_state,
        )
        driver = JobDriver(_to_cluster(self.cluster), plan)
        driver.start()
        return Job(driver)

    def validate(self) -> tuple[Finding, ...]:
        """Ask everything that `start` asks before it changes anything; return what was found.

        Sources and sinks are asked whether they can be read and written, the cluster whether it
        has the slots, and the checkpoint storage what the job would go on from. Nothing is created,
        claimed or started, so a running job of the same name is not disturbed. A finding of level
        `PROBLEM` would make the start fail.

        Raises:
            ConfigError: The graph is incomplete, or a sink that is written is retired.
        """
        plan = self._make_plan(self._complete_graph(), None, None)
        return check_job(_to_cluster(self.cluster), plan)

    def describe(self) -> PipelineDescription:
        """Return the operators, how they are connected, and every setting with its origin.

        Raises:
            ConfigError: The graph is incomplete, or a sink that is written is retired.
        """
        graph = self._complete_graph()
        return PipelineDescription(
            self.name,
            describe_graph(graph, self._parallelism),
            self._shown_settings,
            self._checkpointing.checkpoint_storage(),
            dict(graph.sources()),
            {operator.uid: work.sink for operator, work in graph.sinks()},
        )

    def _complete_graph(self) -> Graph:
        graph = self._graph.graph()
        graph.check_complete()
        for operator, work in graph.sinks():
            if work.sink_id in self._retired_sinks:
                raise ConfigError(
                    f"{operator.uid!r} writes under sink id {work.sink_id!r}, which is in"
                    " retired_sinks: omit it there"
                )
        return graph

    def _make_plan(
        self, graph: Graph, restore: RestoreFrom | None, allow_non_restored_state: bool | None
    ) -> JobPlan:
        return JobPlan(
            name=self.name,
            graph=graph,
            parallelism=self._parallelism,
            max_parallelism=self._max_parallelism,
            checkpointing=self._checkpointing,
            backend=self._backend,
            restart=self._restart,
            settings=self._settings,
            retired_sinks=self._retired_sinks,
            allow_non_restored_state=(
                self._allow_non_restored_state
                if allow_non_restored_state is None
                else allow_non_restored_state
            ),
            listeners=self._listeners,
            endpoint=self._endpoint,
            metrics=self._metrics,
            logging=self._configured.logging(),
            telemetry=self._configured.telemetry(),
            shown_settings=self._shown_settings,
            restore=restore,
        )

    @without_internal_frames
    def run(self, timeout_s: float | None = None) -> JobStatus:
        """Start the job and wait for its end, which SIGINT and SIGTERM bring; see `Job.wait`."""
        return self.start().wait(timeout_s)


def _check_parallelism(parallelism: int, max_parallelism: int | None) -> None:
    """Raise ConfigError unless each slot can have a key group."""
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
            f"the savepoint is not done after {timeout_s} s; it may be yet"
        ) from None


def _to_cluster(cluster: SparkSession | ConnectSession | LocalProcesses) -> Cluster:
    """Return `cluster` as the runtime sees it. Spark is imported only where it is used."""
    if isinstance(cluster, LocalProcesses):
        return cluster
    # By the name of its module: importing Connect's classes to ask would need grpc, which a plain
    # Spark has not.
    if type(cluster).__module__.startswith("pyspark.sql.connect."):
        from onceflow.core.runtime.cluster.spark_connect import SparkConnectCluster

        return SparkConnectCluster(cast("ConnectSession", cluster))
    from onceflow.core.runtime.cluster.spark import SparkCluster

    return SparkCluster(cast("SparkSession", cluster))
