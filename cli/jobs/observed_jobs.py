"""The jobs in a checkpoint storage, described by their drivers or, without one, by the storage.

The description of a job without a driver is cached for REMEMBERED_S. So several open pages read the
storage no more often than one page.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial

import msgspec

from onceflow.cli.jobs import client
from onceflow.cli.jobs.driver_access import DriverAccess
from onceflow.core.errors import OnceflowError
from onceflow.core.runtime.driver.job_views import describe_decision, describe_stored
from onceflow.core.storage import JobStorage

ANSWER_TIMEOUT_S = 5.0
"""The timeout for answers that a driver has in memory."""
READ_TIMEOUT_S = 55.0
"""The timeout for answers that a driver reads from storage or targets. It must be less than the
server's CALL_TIMEOUT_S."""
LIST_TIMEOUT_S = 8.0
REMEMBERED_S = 2.0
_READS_OF_STORAGE = frozenset({"proof", "stored", "state"})


@dataclass(frozen=True, slots=True)
class _Remembered:
    answer: client.Answer
    until_s: float


class ObservedJobs:
    """The jobs in one storage. Any thread may use it."""

    def __init__(self, storage: str, access: DriverAccess) -> None:
        """Store the arguments. Reads nothing."""
        self.storage = storage
        self._access = access
        self._lock = threading.Lock()
        self._opened: dict[str, JobStorage] = {}
        self._drivers: dict[str, client.Driver] = {}
        self._without_driver: dict[str, _Remembered] = {}

    def names(self) -> tuple[str, ...]:
        """Return the names of all jobs.

        Raises:
            ConfigError: The storage does not exist.
            StorageError: The storage cannot be read at the moment.
        """
        return self._location("_").described.open("_").jobs()

    def summaries(self) -> list[client.Answer]:
        """Return a line for each job. Asks all drivers concurrently, for up to LIST_TIMEOUT_S.

        Raises:
            ConfigError: The storage does not exist.
            StorageError: The storage cannot be read at the moment.
        """
        asked = {
            name: client.begin(f"job {name}", partial(self._summarize, name))
            for name in self.names()
        }
        wait(asked.values(), LIST_TIMEOUT_S)
        late = f"unknown: no answer within {LIST_TIMEOUT_S:g} s"
        return [
            line.result() if line.done() else {"job": name, "state": late}
            for name, line in asked.items()
        ]

    def read_overview(self, name: str) -> client.Answer:
        """Return the state of a job whose driver does not answer, from its storage.

        Raises:
            ConfigError: The storage has no such job.
            StorageError: The storage cannot be read at the moment.
            CheckpointCorrupt: The job's log is damaged.
        """
        now_s = time.monotonic()
        with self._lock:
            remembered = self._without_driver.get(name)
        # Read outside the lock: reading a log may take seconds, and two concurrent readers do no
        # harm.
        if remembered is None or remembered.until_s < now_s:
            remembered = _Remembered(self._make_overview(name), now_s + REMEMBERED_S)
            with self._lock:
                self._without_driver[name] = remembered
        return remembered.answer | {"now_ms": int(time.time() * 1000)}

    def read_stored(self, name: str) -> client.Answer:
        """Return the checkpoints and savepoints of a job. Raises the errors of `read_overview`."""
        return describe_stored(self._location(name).described, self._open(name))

    def driver(self, name: str) -> client.Driver:
        """Return the driver of a job. The driver is cached after the first call.

        Raises:
            ConfigError: The storage has no such job, or the driver's token cannot be read.
            DriverNotThere: No driver has stored its address.
        """
        with self._lock:
            known = self._drivers.get(name)
        if known is None:
            known = client.Driver(self._location(name), self._open(name))
            with self._lock:
                self._drivers[name] = known
        return known

    def relay(
        self, name: str, method: str, path: str, body: bytes | None, deadline_ms: int
    ) -> client.RelayedAnswer:
        """Forward a request to the driver of a job. Return the unchanged answer.

        Raises:
            ConfigError: As in `driver`.
            DriverNotThere: No driver answers. A GET was also tried with the newest address.
            DriverSilent: The driver does not answer, and may live.
        """
        what = path.partition("?")[0]
        timeout_s = READ_TIMEOUT_S if what in _READS_OF_STORAGE else ANSWER_TIMEOUT_S
        driver = self.driver(name)
        try:
            return driver.relay(method, path, body, deadline_ms, timeout_s)
        except client.DriverNotThere:
            self._forget(name, driver)
            # A restarted driver has stored another address. Do not repeat a request that changes
            # something, because the first one may have been carried out.
            newest = self.driver(name)
            if method != "GET" or newest.address.instance == driver.address.instance:
                self._forget(name, newest)
                raise
            return newest.relay(method, path, body, deadline_ms, timeout_s)

    def _forget(self, name: str, driver: client.Driver) -> None:
        with self._lock:
            # Another thread may have stored a newer driver in the meantime.
            if self._drivers.get(name) is driver:
                del self._drivers[name]

    def _location(self, name: str) -> client.DriverLocation:
        return client.DriverLocation(self.storage, name, ANSWER_TIMEOUT_S, self._access)

    def _open(self, name: str) -> JobStorage:
        with self._lock:
            opened = self._opened.get(name)
        if opened is None:
            opened = self._location(name).open()
            with self._lock:
                self._opened[name] = opened
        return opened

    def _make_overview(self, name: str) -> client.Answer:
        storage = self._open(name)
        run = client.last_run_of(storage)
        return {
            "job": name,
            "instance": "",
            "running": False,
            "state": client.state_without_driver(run),
            "last_run": run,
            **describe_decision(storage.log.read()),
        }

    def _summarize(self, name: str) -> client.Answer:
        try:
            reply = self.relay(name, "GET", "overview", None, 0)
            answer: client.Answer = msgspec.json.decode(reply.content)
            if reply.status == 200:
                return summarize_running(answer)
            return {"job": name, "state": f"unknown: {answer.get('error', reply.status)}"}
        except client.DriverNotThere:
            pass
        except (client.DriverSilent, OnceflowError, msgspec.DecodeError) as error:
            return {"job": name, "state": "unknown: no answer", "error": str(error)}
        except (KeyError, TypeError, AttributeError) as error:
            broken = f"the driver's answer is no overview: {type(error).__name__}: {error}"
            return {"job": name, "state": "unknown: no answer", "error": broken}
        try:
            return summarize_stored(self.read_overview(name))
        except OnceflowError as error:
            return {"job": name, "state": "unknown", "error": str(error)}


def summarize_running(now: client.Answer) -> client.Answer:
    """Return the line of a job from its driver's overview."""
    sources = {source["uid"] for source in now["sources"]}
    rates = [chain["records_in_per_s"] for chain in now["chains"] if chain["chain"] in sources]
    lags = [source["lag"] for source in now["sources"] if source["lag"] is not None]
    last = now["last_checkpoint"]
    known = [rate for rate in rates if rate is not None]
    return {
        "job": now["job"],
        "state": now["state"],
        "error": now["last_error"] if now["state"] in {"failed", "restarting"} else "",
        "attempt": now["attempt"],
        "checkpoint": last["checkpoint"] if last else None,
        "decided_at_ms": last["triggered_at_ms"] + last["duration_ms"] if last else None,
        "records_per_s": sum(known) if known else None,
        "lag": sum(lags) if lags else None,
        "in_doubt": sum(sink["prepared"] for sink in now["sinks"]),
        "oldest_prepared_s": max((sink["oldest_prepared_s"] for sink in now["sinks"]), default=0),
    }


def summarize_stored(now: client.Answer) -> client.Answer:
    """Return the line of a job from its storage only."""
    decision, run = now["decision"], now["last_run"]
    return {
        "job": now["job"],
        "state": now["state"],
        "error": run.error if run else "",
        "attempt": now["attempt"] or None,
        "checkpoint": decision["checkpoint"] if decision else None,
        "decided_at_ms": decision["completed_at_ms"] if decision else None,
    }
