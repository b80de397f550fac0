"""All targets that are measured."""

from __future__ import annotations

from benchmarks.sinks.files import FilesPlace
from benchmarks.sinks.kafka import KafkaPlace
from benchmarks.sinks.lake import lake_places
from benchmarks.sinks.mysql import MySQLPlace
from benchmarks.sinks.place import Place
from benchmarks.sinks.postgres import PostgresPlace
from benchmarks.stage import Stage


def places(stage: Stage) -> list[Place]:
    """Return every target; its server runs when it is first asked for a place, or does already."""
    return [
        PostgresPlace(stage),
        MySQLPlace(stage, "mysql"),
        MySQLPlace(stage, "mariadb"),
        KafkaPlace(stage),
        FilesPlace(stage.directory),
        *lake_places(stage.directory),
    ]
