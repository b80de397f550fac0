"""Quix Streams: PostgreSQLSink, with and without its upsert."""

from __future__ import annotations

import itertools
from pathlib import Path

from benchmarks.scoreboard.contestant import Contestant, Deployment, Place, Role, Say, Way
from benchmarks.scoreboard.contestants.environments import find_python, make_environment

_VERSION = "3.28.1"
_ENVIRONMENT = f"quixstreams-{_VERSION}"
_JOB = Path(__file__).parents[1] / "jobs" / "quix_job.py"


class Quix(Contestant):
    """One process of Quix Streams, in a consumer group."""

    engine = f"Quix Streams {_VERSION}"
    links = (
        "https://quix.io/docs/quix-streams/configuration.html",
        "https://quix.io/docs/quix-streams/connectors/sinks/postgresql-sink.html",
    )

    def __init__(self, way: Way) -> None:
        self.way = way
        self.name = f"quix-{way}"
        self.settings = (
            "processing_guarantee exactly-once (of state and topics), commit_interval 1 s",
            "session.timeout.ms 6000, so that a killed member leaves its group sooner",
            "the process is started again on a new state_dir, and restores from the changelog",
        )
        if way == "upsert":
            self.sink = "PostgreSQLSink, upsert_on_primary_key=True"
            self.claim = "at least once, effectively once by key"
        else:
            self.sink = "PostgreSQLSink"
            self.claim = "at least once"

    def install(self, say: Say) -> None:
        """Make the environment of Quix Streams."""
        make_environment(_ENVIRONMENT, [f"quixstreams[postgresql]=={_VERSION}"], say)

    def deploy(self, place: Place) -> Deployment:
        """Return one process."""
        states = itertools.count()

        def command() -> tuple[object, ...]:
            # A frozen process keeps its RocksDB. Its successor restores from the changelog.
            state = place.directory / f"state-{next(states)}"
            return (
                *(find_python(_ENVIRONMENT), _JOB, self.way, place.bootstrap_servers),
                *(place.topic, place.database_host, place.database_port, place.database, state),
            )

        return Deployment(
            [Role("application", command, {"PYTHONPATH": None})],
            place.directory,
            coordinator="application",
            worker="application",
        )
