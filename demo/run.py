"""One run of the demo, from the servers' start to the verdict."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from demo import targets
from demo.driver import JOB, DemoDriver, DriverStatus, JobSpec, SinkSpec
from demo.kills import Killer, Progress, Victims, plan_kills
from demo.move import Mover, records_before
from demo.report import DemoResult, Narrator, StatusWatcher, describe
from demo.settings import (
    KILL_OF_DATABASE,
    DemoSettings,
    KillKind,
    SinkKind,
    StorageKind,
)
from tests.support.servers.s3 import EmbeddedS3
from typing_extensions import Self

from onceflow.cli.jobs.driver_access import DriverAccess
from onceflow.cli.jobs.observed_jobs import ObservedJobs
from onceflow.cli.ui.jobs_api import UiServer
from onceflow.core.errors import OnceflowError
from onceflow.core.storage import checkpoint_storage
from onceflow.integration.judge import Verdict
from onceflow.integration.servers import EmbeddedKafka
from onceflow.integration.workload import Payments, produce

TOPIC = "payments"
_LOOK_INTERVAL_S = 0.02
_PRODUCER_LOOK_INTERVAL_S = 0.01
_STOPPED = "stopped"
_VISITOR_TIMEOUT_S = 120.0
"""How long the job waits for somebody to open its page."""


class _Abandoned(Exception):
    """Ends the production when the demo ends before it."""


class Producing:
    """Produces on a thread of its own, never further than the killer has released."""

    def __init__(
        self,
        payments: Payments,
        spec: JobSpec,
        holders: tuple[Killer, Mover],
        narrator: Narrator,
    ) -> None:
        """Describe it; entering the context begins."""
        self._payments = payments
        self._spec = spec
        self._holders = holders
        self._advance = narrator.bar("payments into Kafka", payments.records)
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="demo producer")
        self._result: Future[None] | None = None

    def wait(self) -> None:
        """Wait until every payment is in the topic.

        Raises:
            ProduceError: The broker did not take one.
        """
        if self._result is not None:
            self._result.result()

    def check(self) -> None:
        """Return at once; raise what went wrong if something did.

        Raises:
            ProduceError: The broker did not take a payment.
        """
        if self._result is not None and self._result.done():
            self._result.result()

    def __enter__(self) -> Self:
        """Begin."""
        self._result = self._pool.submit(
            produce,
            self._payments,
            self._spec.bootstrap_servers,
            self._spec.topic,
            progress=self._hold,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End, done or not."""
        self._ended.set()
        self._pool.shutdown(wait=True)

    def _hold(self, sent: int) -> None:
        self._advance(sent)
        while self._count_released() <= sent < self._payments.records:
            if self._ended.wait(_PRODUCER_LOOK_INTERVAL_S):
                raise _Abandoned
        if self._ended.is_set():
            raise _Abandoned

    def _count_released(self) -> int:
        return min(holder.released_records for holder in self._holders)


class DemoError(OnceflowError):
    """Raised when the run came to no verdict: a server, the driver or the job gave up."""

    domain = "external"
    retry = "never"


class DemoRun:
    """Owns the servers, the driver and the files of one run; a context manager."""

    def __init__(
        self, settings: DemoSettings, narrator: Narrator, *, serves_page: bool = False
    ) -> None:
        """Describe it; nothing is started."""
        self._settings = settings
        self._serves_page = serves_page
        self._narrator = narrator
        self._directory = Path(tempfile.mkdtemp(prefix="onceflow-demo-"))
        self._stack = ExitStack()
        self.addresses: dict[str, str] = {}
        """Where the running servers are, by name."""

    def __enter__(self) -> DemoRun:
        """Return the run."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything and delete every file."""
        self._stack.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def execute(self) -> DemoResult:
        """Run the whole demo; the servers and the rows stay until the context ends.

        Raises:
            DemoError: There is nothing to judge; quotes the driver's log.
            ServerError: A server could not be had.
        """
        target, kafka = self._start_servers()
        spec = self._job_spec(target, kafka)
        if self._serves_page:
            self._serve_page(spec.storage)
        driver = DemoDriver(spec, self._directory)
        self._stack.callback(driver.end)
        killer = self._killer(self._victims(driver, target, kafka))
        mover = Mover(self._settings, spec, driver, self._narrator.say)
        payments = self._settings.payments()
        with Producing(payments, spec, (killer, mover), self._narrator) as producing:
            if not self._settings.kills and not self._settings.move:
                # Nothing is held back: the job finds the whole topic and shows its full speed.
                producing.wait()
            started_at = time.monotonic()
            driver.start()
            final = self._watch(driver, (killer, mover), producing, spec, target)
            seconds = time.monotonic() - started_at
        # Orphans of killed drivers must be gone before the verdict, or they could still write.
        driver.end()
        self._narrator.say(f"asking the {self._settings.sink.target_kind}")
        return DemoResult(
            settings=self._settings,
            verdict=self._judge(target, mover.storages),
            kills=tuple(killer.done),
            restores=max(final.attempt - 1, 0),
            drivers=driver.starts,
            seconds=seconds,
            move=mover.done,
        )

    def _serve_page(self, storage: str) -> None:
        """Serve one page for all drivers of the run; wait for a visitor who sits at a terminal."""
        if self._settings.storage is StorageKind.DIRECTORY:
            Path(storage).mkdir(exist_ok=True)
        server = UiServer(ObservedJobs(storage, DriverAccess()))
        self._stack.callback(server.close)
        server.start()
        self.addresses["Page"] = server.url
        say = self._narrator.say
        say(f"page:  {server.url}\ntoken: {server.token}")
        server.open_browser()
        if sys.stdin.isatty():
            say(f"sign in there: the job starts then, or after {_VISITOR_TIMEOUT_S:g} s")
            server.wait_for_visitor(_VISITOR_TIMEOUT_S)

    def _killer(self, victims: Victims) -> Killer:
        settings = self._settings
        return Killer(
            plan_kills(
                settings.kills,
                records_before(settings),
                settings.seed,
                interval_s=settings.interval_s,
            ),
            victims,
            records=settings.records,
            records_until_over=records_before(settings),
            seed=settings.seed,
            say=self._narrator.say,
        )

    def _victims(
        self, driver: DemoDriver, target: targets.DemoTarget, kafka: EmbeddedKafka
    ) -> Victims:
        kill = KILL_OF_DATABASE.get(self._settings.sink, KillKind.KAFKA)
        return Victims(driver, {KillKind.KAFKA: kafka, kill: target.server})

    def _judge(self, target: targets.DemoTarget, storages: tuple[str, ...]) -> Verdict:
        """Return the target's verdict; rows that are staged for it still are in doubt too."""
        verdict = target.judge(self._settings.payments())
        staged = sum(map(transactions_with_staged_rows, storages))
        return replace(verdict, in_doubt=verdict.in_doubt + staged)

    def _start_servers(self) -> tuple[targets.DemoTarget, EmbeddedKafka]:
        say, at_end, settings = self._narrator.say, self._stack.callback, self._settings
        say("starting " + " and ".join(dict.fromkeys((settings.sink.product, "Kafka"))))
        with ThreadPoolExecutor(max_workers=2) as pool:
            kafka_started = pool.submit(_start_kafka, at_end, say)
            target_started = pool.submit(
                targets.start_target,
                settings.sink,
                kafka_started,
                settings.partitions,
                directory=self._directory,
                at_end=at_end,
                say=say,
            )
            target, kafka = target_started.result(), kafka_started.result()
        kafka.create_topic(TOPIC, settings.partitions)
        self.addresses = {
            settings.sink.product: target.address,
            SinkKind.KAFKA.product: kafka.bootstrap_servers,
        }
        return target, kafka

    def _job_spec(self, target: targets.DemoTarget, kafka: EmbeddedKafka) -> JobSpec:
        # A killed slot cannot delete its working files; the demo does, with its directory.
        scratch = self._directory / "scratch"
        scratch.mkdir()
        return JobSpec(
            spark_master=self._settings.spark_master,
            bootstrap_servers=kafka.bootstrap_servers,
            topic=TOPIC,
            sink=SinkSpec(
                self._settings.sink, target.address, targets.NAME, self._settings.commit_mode
            ),
            storage=self._storage(),
            scratch=str(scratch),
            status_path=str(self._directory / "status.json"),
            stop_path=str(self._directory / "stop"),
            group="onceflow-demo",
            parallelism=self._settings.parallelism,
            backend=self._settings.backend.value,
            interval_s=self._settings.interval_s,
            at_least_once=self._settings.at_least_once,
            unaligned=self._settings.unaligned,
        )

    def _storage(self) -> str:
        """Return where checkpoints are to be; starts the server of a bucket."""
        if self._settings.storage is StorageKind.DIRECTORY:
            return str(self._directory / "checkpoints")
        self._narrator.say("starting an S3 server")
        server = EmbeddedS3()
        self._stack.callback(server.stop)
        server.start()
        # Of this process, and of all that it starts.
        before = {name: os.environ.get(name) for name in server.environment}
        self._stack.callback(_set_environment, before)
        _set_environment(server.environment)
        self.addresses["S3"] = server.endpoint
        return f"s3://{server.create_bucket('onceflow-demo')}/checkpoints"

    def _watch(
        self,
        driver: DemoDriver,
        holders: tuple[Killer, Mover],
        producing: Producing,
        spec: JobSpec,
        target: targets.DemoTarget,
    ) -> DriverStatus:
        """Return the last status of a job that has stopped, killing what is due meanwhile."""
        settings, (killer, mover) = self._settings, holders
        deadline = time.monotonic() + settings.timeout_s
        rows_bar = f"rows in {settings.sink.product}"
        advance = self._narrator.bar(rows_bar, settings.records)
        watcher = StatusWatcher(self._narrator.say, partial(self._narrator.note, rows_bar))
        with (
            targets.Observer("rows", target.visible_rows) as rows,
            targets.observe_committed_records(
                spec.bootstrap_servers, spec.group, TOPIC, settings.partitions
            ) as committed,
        ):
            # The last status is read after the exit, when no further one can be written.
            while (exit_status := driver.exit_status) is None:
                advance(rows.value)
                producing.check()
                now_s, status = time.monotonic(), driver.status()
                watcher.look(status)
                killer.look(Progress(status, committed.value, rows.value, now_s))
                mover.look(kills_over=killer.finished, committed_records=committed.value)
                if mover.finished and killer.finished and committed.value >= settings.records:
                    driver.stop()
                if now_s > deadline:
                    raise DemoError(
                        f"the job had not finished after {settings.timeout_s:g} s: "
                        f"{committed.value} of {settings.records} records committed; its log "
                        f"ends:\n{driver.log_tail()}"
                    )
                time.sleep(_LOOK_INTERVAL_S)
            status = driver.status()
        if exit_status != 0 or status is None or status.state != _STOPPED:
            raise DemoError(
                f"the driver ended with status {exit_status} in state "
                f"{status.state if status else 'unknown'}; its log ends:\n{driver.log_tail()}"
            )
        advance(settings.records)
        for sink in status.sinks:
            self._narrator.say(f"the last attempt's {describe(sink)}")
        return status


def transactions_with_staged_rows(storage: str, name: str = JOB) -> int:
    """Return how many transactions have rows in the job's storage that wait for their commit.

    Asks storage and not the sinks: what is there without rows is a sink's own mark.
    """
    job = checkpoint_storage(storage).open(name)
    areas = [job.staging(sink_id) for sink_id in job.list_staged_sinks(())]
    return sum(
        any(batch.num_rows for _, batch in area.read(transaction) or ())
        for area in areas
        for transaction in area.transactions()
    )


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _start_kafka(
    at_end: Callable[[Callable[[], None]], object], say: Callable[[str], None]
) -> EmbeddedKafka:
    server = EmbeddedKafka(progress=say)
    at_end(server.stop)
    return server.start()
