"""Bytewax: its Kafka source and its recovery, and a sink by psycopg as its guide shows."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.scoreboard.contestant import Contestant, Deployment, Place, Role, Say, Way
from benchmarks.scoreboard.contestants.environments import find_python, make_environment

_VERSION = "0.21.1"
_ENVIRONMENT = f"bytewax-{_VERSION}"
_FLOW = Path(__file__).parents[1] / "jobs" / "bytewax_flow.py"


class _Process(Deployment):
    # The guide terminates all processes before it starts the dataflow again.
    replaces_frozen = False


class Bytewax(Contestant):
    """One process of Bytewax with two workers."""

    engine = f"Bytewax {_VERSION}"
    links = ("https://docs.bytewax.io/v0.20.0/guide/concepts/recovery.html",)

    def __init__(self, way: Way) -> None:
        self.way = way
        self.name = f"bytewax-{way}"
        self.settings = (
            "two workers in a process, two recovery partitions, snapshot interval 1 s",
            "a DynamicSink by psycopg, one transaction a batch: Bytewax has no sink for Postgres",
            "the process is started again with the same recovery directory",
        )
        if way == "upsert":
            self.sink = "DynamicSink, INSERT … ON CONFLICT (id)"
            self.claim = "at least once, effectively once by key"
        else:
            self.sink = "DynamicSink, INSERT"
            self.claim = "at least once"

    def install(self, say: Say) -> None:
        """Make the environment of Bytewax."""
        requirements = [
            f"bytewax[kafka]=={_VERSION}",
            "confluent-kafka==2.16.1",
            "psycopg[binary]==3.3.9",
        ]
        make_environment(_ENVIRONMENT, requirements, say)

    def deploy(self, place: Place) -> Deployment:
        """Return one process, with the recovery store that its documentation asks for."""
        python, store = find_python(_ENVIRONMENT), place.directory / "recovery"
        store.mkdir()
        subprocess.run([python, "-m", "bytewax.recovery", store, "2"], check=True)
        command = (
            *(python, "-m", "bytewax.run", f"{_FLOW}:flow", "-w", "2"),
            *("-r", store, "-s", "1", "-b", "0"),
        )
        environment = {
            "PYTHONPATH": None,
            "SCOREBOARD_WAY": self.way,
            "SCOREBOARD_SERVERS": place.bootstrap_servers,
            "SCOREBOARD_TOPIC": place.topic,
            "SCOREBOARD_URL": place.url,
        }
        return _Process(
            [Role("dataflow", lambda: command, environment)],
            place.directory,
            coordinator="dataflow",
            worker="dataflow",
        )
