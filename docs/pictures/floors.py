"""The picture of the floors of the code: each imports only floors below it."""

from __future__ import annotations

from docs.pictures.drawing import Box, Color, Picture

_FLOORS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("cli", "the onceflow command"),),
    (("connectors", "formats of Spark, the catalog, what authors of connectors import"),),
    (("sources", "Kafka, generated records"), ("sinks", "databases, Kafka, files, lakes")),
    (("formats", "JSON, Avro, Protobuf, CSV, Debezium"),),
    (("clients", "Kafka, Postgres, MySQL, SQLite: connections, catalogs, types"),),
)
_ROOMS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("api", "pipelines and streams"),),
    (("runtime", "driver, slots, transport, dataflow"),),
    (("compiled", "users' functions as Arrow kernels"),),
    (("plan", "graph, functions, windows"), ("settings", "what users set")),
    (("commit", "commits and aborts"),),
    (("state", "heap and RocksDB"), ("storage", "checkpoints, decision log")),
    (("spi", "the contracts of sources and sinks"),),
    (("protocol", "decisions without I/O"),),
)
_LEFT, _WIDTH, _GAP = 24.0, 912.0, 12.0


def draw_floors() -> Picture:
    """Draw the floors from the command line down to the engine, and the rooms of the engine."""
    picture = Picture(
        "The floors of the code",
        "From the top: cli, connectors, sources beside sinks, formats, clients, core. Inside core "
        "from the top: api, runtime, compiled, plan beside settings, commit, state beside storage, "
        "spi, protocol. Each imports only what stands below it.",
        960,
        670,
    )
    bottom = _draw_rows(picture, _FLOORS, Box(_LEFT, 24, _WIDTH, 40), "blue")
    picture.box(Box(_LEFT, bottom, _WIDTH, 376), color="white", radius=8)
    picture.text(_LEFT + 14, bottom + 22, "core: the engine, which knows no technology", bold=True)
    _draw_rows(picture, _ROOMS, Box(_LEFT + 14, bottom + 34, _WIDTH - 28, 34), "purple")
    picture.text(_LEFT, 652, "A floor imports only floors below it.", muted=True)
    return picture


def _draw_rows(
    picture: Picture, rows: tuple[tuple[tuple[str, str], ...], ...], first: Box, color: Color
) -> float:
    """Draw one row of boxes below the other, and return where the next one would begin."""
    top = first.y
    for row in rows:
        width = (first.width - _GAP * (len(row) - 1)) / len(row)
        for number, (name, words) in enumerate(row):
            place = Box(first.x + number * (width + _GAP), top, width, first.height)
            picture.box(place, f"{name}: {words}", color=color, size=14)
        top += first.height + 8
    return top
