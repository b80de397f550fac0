"""onceflow: PostgresSink with prepared transactions, and slots that are processes of their own."""

from __future__ import annotations

from contextlib import suppress
from importlib import metadata
from pathlib import Path

import msgspec
from tests.support.program import python

from benchmarks.scoreboard.contestant import Contestant, Deployment, Place, Role, Say
from benchmarks.scoreboard.jobs.onceflow_job import JobSpec
from onceflow.integration.faults import processes

_JOB = "benchmarks.scoreboard.jobs.onceflow_job"


class Onceflow(Contestant):
    """onceflow with its default settings, and a checkpoint each second."""

    name = "onceflow"
    engine = f"onceflow {metadata.version('onceflow')}"
    sink = "PostgresSink, delivery exactly_once"
    way = "append"
    claim = "exactly once"
    settings = (
        "LocalProcesses, 2 slots, HeapBackend",
        "Checkpointing(interval=1.0), PostgresSink defaults (prepared transactions)",
        "FixedDelay(delay_s=1.0), heartbeat_timeout_s=10; the driver is started again",
    )
    links = ("sinks/postgres.md",)

    def install(self, say: Say) -> None:
        """Do nothing: onceflow is here."""

    def deploy(self, place: Place) -> Deployment:
        """Return a driver, which forks its slots."""
        spec = JobSpec(
            bootstrap_servers=place.bootstrap_servers,
            topic=place.topic,
            url=place.url,
            storage=str(place.directory / "checkpoints"),
            scratch=str(place.directory),
            pids=str(place.directory / "slots"),
        )
        path = place.directory / "job.json"
        path.write_bytes(msgspec.json.encode(spec))
        driver = Role("driver", lambda: python("-m", _JOB, path))
        return _Driver([driver], place.directory, Path(spec.pids))


class _Driver(Deployment):
    def __init__(self, roles: list[Role], directory: Path, pids: Path) -> None:
        super().__init__(roles, directory, coordinator="driver", worker="driver")
        self._pids = pids

    def find_worker(self) -> int | None:
        """Return the last slot that runs."""
        with suppress(FileNotFoundError):
            for pid in reversed(self._pids.read_text().split()):
                if processes.is_alive(int(pid)):
                    return int(pid)
        return None
