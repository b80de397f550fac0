"""Pictures of the running dataflow: the whole job, barriers in channels, and key groups."""

from __future__ import annotations

from docs.pictures.drawing import Box, Color, Picture


def draw_overview() -> Picture:
    """Draw a job with two slots, and the five steps of one checkpoint."""
    picture = Picture(
        "How onceflow writes each row once",
        "A driver asks two Spark tasks for checkpoint 7. In each task, a barrier travels from "
        "the source through the state to the sink. The state is saved to checkpoint storage. "
        "The sink prepares a transaction in the database. The driver appends checkpoint 7 to "
        "the decision log. Then the sinks commit, and the rows become visible.",
        960,
        440,
    )
    kafka = picture.box(
        Box(24, 160, 130, 200), "Kafka", "topic with", "two partitions", color="blue"
    )
    target = picture.box(
        Box(806, 160, 130, 200), "Target", "Postgres, MySQL,", "Kafka, Iceberg…", color="green"
    )
    driver = picture.box(
        Box(214, 28, 300, 56), "Driver", "decides checkpoints, restarts", color="yellow"
    )
    storage = picture.box(
        Box(640, 28, 296, 56),
        "Checkpoint storage",
        "state files and the decision log",
        color="yellow",
    )
    for number, top in enumerate((142, 272)):
        draw_slot(picture, number, top)
        middle = top + 66
        picture.arrow((kafka.right, middle), (230, middle), color="blue")
        for step, y in ((3, middle - 16), (5, middle + 16)):
            picture.arrow((722, y), (target.x, y), color="green")
            picture.step(764, y, step)
    picture.arrow((250, driver.bottom), (250, 140), color="yellow")
    picture.step(250, 112, 1)
    picture.text(266, 117, "trigger")
    picture.arrow((476, 140), (476, 112), (700, 112), (700, storage.bottom), color="purple")
    picture.step(530, 112, 2)
    picture.text(548, 104, "save state")
    picture.arrow((driver.right, 56), (storage.x, 56), color="yellow")
    picture.step(577, 40, 4)
    draw_steps(picture, 424)
    return picture


def draw_slot(picture: Picture, number: int, top: float) -> None:
    """Draw one slot with its chain of operators."""
    slot = Box(200, top, 536, 112)
    picture.box(slot, color="white", radius=8)
    picture.text(slot.x + 10, slot.y + 20, f"Slot {number + 1} (a Spark task)", size=12, muted=True)
    middle = top + 66
    operators: tuple[tuple[str, str, Color], ...] = (
        ("Source", "positions", "blue"),
        ("Operator", "keyed state", "purple"),
        ("Sink", "transactions", "green"),
    )
    for place, (name, holds, color) in enumerate(operators):
        left = 230 + place * 186
        picture.box(Box(left, top + 34, 120, 64), name, holds, color=color)
        if place < 2:
            picture.arrow((left + 120, middle), (left + 186, middle))
    for left in (354, 540):
        picture.rows(left, middle - 16, "grey", "red", "grey", "grey")


def draw_steps(picture: Picture, baseline: float) -> None:
    """Draw the legend of the steps."""
    steps = (
        "barrier starts",
        "state is saved",
        "rows are prepared",
        "decision",
        "rows are visible",
    )
    for number, (left, says) in enumerate(
        zip((60, 240, 420, 620, 770), steps, strict=True), start=1
    ):
        picture.step(left, baseline - 17, number)
        picture.text(left + 16, baseline - 12, says)


def draw_barriers() -> Picture:
    """Draw an aligned barrier beside an unaligned one, at an operator with two inputs."""
    picture = Picture(
        "An aligned and an unaligned barrier",
        "Aligned: the barrier has come on the upper input of an operator, which reads no more "
        "from that input until the barrier has come on the lower input too. Unaligned: the "
        "first barrier is sent on at once, and the rows that it overtakes become part of the "
        "checkpoint.",
        960,
        330,
    )
    for left, title in ((24, "Aligned"), (492, "Unaligned")):
        picture.text(left + 8, 34, title, size=16, bold=True)
        for row, y in enumerate((92, 192)):
            picture.text(left + 8, y - 20, f"input {row + 1}", size=12, muted=True)
            picture.arrow((left + 8, y), (left + 256, y))
        picture.box(Box(left + 258, 62, 112, 160), "Operator", "with state", color="purple")
        picture.arrow((left + 370, 142), (left + 440, 142))
    picture.rows(150, 92, "grey", "grey", "grey", "grey", "grey", "grey", "grey", "grey", "red")
    picture.rows(110, 192, "grey", "red", "blue", "blue", "blue", "blue", "blue", "blue")
    picture.text(32, 244, "The barrier has come on input 1. Rows behind it wait there.", size=13)
    picture.text(32, 266, "Rows before the barrier on input 2 are still processed.", size=13)
    picture.text(32, 288, "Then the state is saved, and the barrier is sent on.", size=13)
    picture.rows(664, 92, "purple", "purple", "purple", "purple", "purple", "red")
    picture.rows(580, 192, "grey", "red", "purple", "purple", "purple", "purple", "purple")
    picture.rows(872, 142, "purple", "purple", "red")
    picture.text(500, 244, "The first barrier overtakes the rows that wait.", size=13)
    picture.text(500, 266, "The state is saved at once, and with it those rows (purple).", size=13)
    picture.text(500, 288, "After a restart, these rows are processed first.", size=13)
    picture.rows(32, 312, "red")
    picture.text(48, 316, "barrier", size=12, muted=True)
    return picture


def draw_key_groups() -> Picture:
    """Draw how a key finds its slot, before and after a change of the parallelism."""
    picture = Picture(
        "From a key to its slot",
        "The hash of a key, modulo the number of key groups, is the number of its key group. "
        "Each slot owns a range of key groups. If the parallelism grows from 2 to 3, whole key "
        "groups move to another slot, with their state.",
        960,
        320,
    )
    picture.box(Box(24, 40, 170, 44), "key “erin”", color="blue")
    picture.arrow((194, 62), (250, 62))
    picture.box(Box(252, 40, 220, 44), "hash mod 12 = 9", color="grey")
    picture.arrow((472, 62), (763, 62), (763, 112))
    picture.text(490, 52, "The number of key groups never changes.", muted=True)
    left, width = 120, 68
    for group in range(12):
        chosen: Color = "blue" if group == 9 else "white"
        picture.box(Box(left + group * width, 116, width - 6, 36), str(group), color=chosen)
    picture.text(24, 139, "key groups", size=13, muted=True)
    colors: tuple[Color, ...] = ("purple", "green", "yellow")
    for parallelism, top in ((2, 182), (3, 244)):
        picture.text(24, top + 26, f"{parallelism} slots", size=13, muted=True)
        share = 12 // parallelism
        for slot in range(parallelism):
            picture.box(
                Box(left + slot * share * width, top, share * width - 6, 42),
                f"slot {slot + 1}: groups {slot * share} to {(slot + 1) * share - 1}",
                color=colors[slot],
            )
    picture.text(120, 306, "A key group moves as a whole, with the state of its keys.", muted=True)
    return picture
