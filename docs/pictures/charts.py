"""Bar charts of measured results: onceflow beside another system.

A chart has one unit, and all of its bars begin at zero. The bar of onceflow is filled and the other
bar is an outline, so that they differ in black and white, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from docs.pictures.drawing import Box, Picture
from docs.pictures.results import Figure, format_ratio, read_figures

WIDTH = 960
BARS_LEFT = 340
BARS_WIDTH = 290
BAR = 17
PITCH = 52
TOP = 74


def draw_databases() -> Picture:
    """Draw the rate of a whole job into three databases, beside Flink."""
    return draw_chart(
        "From Kafka into a database, exactly once: onceflow and Flink 1.20",
        "flink-postgres",
        "flink-mysql",
        "flink-mariadb",
    )


def draw_state() -> Picture:
    """Draw the rate of keyed work without Kafka and a database, beside Flink."""
    return draw_chart(
        "Work with keyed state, without Kafka and a database: onceflow and Flink 1.20",
        "flink-running",
        "flink-running-rocksdb",
        "flink-windows",
        "flink-join",
        "flink-batches",
        "flink-compiled",
        "flink-record",
    )


def draw_spark() -> Picture:
    """Draw the rate of Spark formats, beside Spark's own sources and sinks."""
    return draw_chart(
        "In Spark: the formats of onceflow and Spark's own",
        "spark-stream",
        "spark-write",
        "spark-read",
    )


def draw_loads() -> Picture:
    """Draw the rate of each sink by itself, beside a plain bulk load."""
    return draw_chart(
        "Each sink by itself, exactly once: onceflow and a plain bulk load of the same rows",
        "load-postgres",
        "load-postgres-upsert",
        "load-mysql",
        "load-mysql-upsert",
        "load-mariadb",
        "load-mariadb-upsert",
        "load-kafka",
        "load-parquet",
        "load-iceberg",
        "load-delta",
    )


def draw_chart(title: str, *names: str) -> Picture:
    """Draw two bars for each figure: the rate of onceflow, and that of the other system."""
    known = read_figures()
    figures = [known[name] for name in names]
    picture = Picture(title, describe(figures), WIDTH, TOP + PITCH * len(figures) + 24)
    picture.text(24, 34, title, size=16, bold=True)
    picture.text(24, 58, "rows a second; a longer bar is better", muted=True)
    picture.text(
        WIDTH - 24, 58, "onceflow / other; under 1: slower", size=12, muted=True, anchor="end"
    )
    longest = max(max(figure.ours, figure.theirs or 0) for figure in figures)
    for number, figure in enumerate(figures):
        draw_figure(picture, figure, TOP + number * PITCH, BARS_WIDTH / longest)
    dates = sorted({figure.date for figure in figures})
    days = " to ".join((dates[0], dates[-1])[: len(dates)])
    note = f"Measured on 2 virtual cores, {days}. A ratio is the median over the turns."
    picture.text(24, picture.height - 14, note, size=12, muted=True)
    return picture


def draw_figure(picture: Picture, figure: Figure, top: float, scale: float) -> None:
    """Draw the bars of one figure, their numbers, and the ratio. `scale` is in pixels a unit."""
    picture.text(24, top + 22, figure.what)
    bars = ((figure.ours, "onceflow", True), (figure.theirs or 0, figure.other, False))
    places = [
        Box(BARS_LEFT, top + number * (BAR + 2), round(value * scale, 1), BAR)
        for number, (value, _, _) in enumerate(bars)
    ]
    for place, (value, name, _) in zip(places, bars, strict=True):
        label = f"{name.replace('`', '')}: {figure.format(value)}"
        picture.text(place.right + 8, place.y + 13, label, size=12)
    # The white edge of a label would hide a part of the other bar, so bars come after labels.
    for place, (_, _, filled) in zip(places, bars, strict=True):
        picture.bar(place, filled=filled)
    ratio = format_ratio(figure.ratios[0])
    picture.text(WIDTH - 24, top + 22, ratio, size=15, bold=True, anchor="end")


def describe(figures: Sequence[Figure]) -> str:
    """Return a sentence for each figure, with both values and the ratio."""
    return " ".join(
        f"{figure.what}: onceflow {figure.format(figure.ours)}, {figure.other.replace('`', '')} "
        f"{figure.format(figure.theirs or 0)}, ratio {format_ratio(figure.ratios[0])}."
        for figure in figures
    )
