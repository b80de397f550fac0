"""Pictures of checkpoints: one on a time line, a transaction's life, recovery, layers of state."""

from __future__ import annotations

from docs.pictures.drawing import Box, Color, Picture

LANES: tuple[tuple[str, float, Color], ...] = (
    ("Driver", 130, "yellow"),
    ("Slot 1", 330, "purple"),
    ("Slot 2", 490, "purple"),
    ("Postgres", 670, "green"),
    ("Storage", 850, "yellow"),
)
DRIVER, SLOT_1, SLOT_2, POSTGRES, STORAGE = (x for _, x, _ in LANES)


def draw_checkpoint() -> Picture:
    """Draw the messages of one checkpoint from top to bottom."""
    picture = Picture(
        "One checkpoint, from top to bottom",
        "The driver sends a trigger to both slots. In each slot the barrier travels between the "
        "rows; the sink prepares its transaction in Postgres, and the state goes to storage. "
        "Each slot acknowledges. The driver appends the decision to the log in storage: this is "
        "the commit point. Then it tells both slots, and these commit their prepared "
        "transactions. A crash before the commit point rolls the transactions back. A crash "
        "after it is followed by commits.",
        960,
        560,
    )
    for name, x, color in LANES:
        picture.box(Box(x - 62, 22, 124, 36), name, color=color)
        picture.arrow((x, 58), (x, 540), head=False, dashed=True)
    both(picture, 96, "1  trigger checkpoint 7", DRIVER)
    picture.rows(SLOT_1 - 22, 138, "grey", "red", "grey", "grey")
    picture.rows(SLOT_2 - 22, 138, "grey", "red", "grey", "grey")
    label(picture, SLOT_2 + 36, 143, "2  barrier 7 passes between two rows")
    message(picture, 186, SLOT_1, POSTGRES)
    message(picture, 198, SLOT_2, POSTGRES)
    label(picture, SLOT_2 + 12, 180, "3  PREPARE TRANSACTION", size=12)
    message(picture, 240, SLOT_1, STORAGE)
    message(picture, 252, SLOT_2, STORAGE)
    label(picture, SLOT_2 + 12, 234, "4  state files")
    message(picture, 290, SLOT_1, DRIVER)
    message(picture, 302, SLOT_2, DRIVER)
    label(picture, DRIVER + 14, 281, "5  acknowledge")
    message(picture, 350, DRIVER, STORAGE, "yellow")
    label(picture, DRIVER + 14, 343, "6  append “checkpoint 7 is complete” to the decision log")
    picture.arrow((24, 372), (936, 372), color="red", head=False)
    picture.text(936, 390, "commit point of the whole job", bold=True, color="red", anchor="end")
    both(picture, 420, "7  complete", DRIVER)
    message(picture, 470, SLOT_1, POSTGRES, "green")
    message(picture, 482, SLOT_2, POSTGRES, "green")
    label(picture, SLOT_2 + 12, 464, "8  COMMIT PREPARED", size=12)
    label(picture, POSTGRES + 14, 480, "rows are visible", color="green")
    draw_crashes(picture)
    return picture


def draw_crashes(picture: Picture) -> None:
    """Write what a crash before and after the commit point leads to."""
    for y, lines in (
        (214, ("A crash here:", "rolled back")),
        (460, ("A crash here:", "committed by", "next attempt")),
    ):
        for number, line in enumerate(lines):
            picture.text(20, y + 16 * number, line, size=12, color="red")


def message(picture: Picture, y: float, start: float, end: float, color: Color = "grey") -> None:
    """Draw a message between two lanes."""
    picture.arrow((start, y), (end, y), color=color)


def both(picture: Picture, y: float, says: str, start: float) -> None:
    """Draw a message from the driver to both slots."""
    message(picture, y, start, SLOT_1, "yellow")
    message(picture, y + 12, start, SLOT_2, "yellow")
    label(picture, start + 14, y - 8, says)


def label(
    picture: Picture, x: float, y: float, says: str, *, size: float = 13, color: Color | None = None
) -> None:
    """Write the text of a message."""
    picture.text(x, y, says, size=size, color=color)


def draw_transaction() -> Picture:
    """Draw the states of one sink transaction."""
    picture = Picture(
        "The life of a transaction",
        "Rows are written into an open transaction. At the barrier the transaction is prepared: "
        "its rows are durable and invisible. When the checkpoint is in the decision log, the "
        "transaction is decided, and then committed. An open transaction is rolled back by a "
        "crash, and a prepared one that no decision lists is rolled back by the next attempt. A "
        "decided transaction that is gone without a proof of its commit is lost: the job stops "
        "and names it.",
        960,
        300,
    )
    states: tuple[tuple[str, tuple[str, ...], Color], ...] = (
        ("open", ("rows are written",), "grey"),
        ("prepared", ("durable, invisible",), "purple"),
        ("decided", ("in the decision log",), "yellow"),
        ("committed", ("visible, for good",), "green"),
    )
    moves = ("barrier", "checkpoint complete", "commit")
    for number, (name, says, color) in enumerate(states):
        left = 24 + number * 246
        picture.box(Box(left, 52, 170, 64), name, *says, color=color)
        if number < 3:
            picture.arrow((left + 170, 84), (left + 246, 84))
            picture.text(left + 208, 40, moves[number], size=12, anchor="middle", muted=True)
    picture.box(
        Box(24, 206, 416, 62),
        "rolled back",
        "its records are read again",
        color="grey",
        dashed=True,
    )
    picture.arrow((109, 116), (109, 204), dashed=True)
    picture.text(119, 164, "crash", size=12, muted=True)
    picture.arrow((355, 116), (355, 204), dashed=True)
    picture.text(345, 156, "no decision lists it:", size=12, muted=True, anchor="end")
    picture.text(345, 172, "next attempt", size=12, muted=True, anchor="end")
    picture.box(
        Box(516, 206, 420, 62),
        "lost",
        "the job stops: PreparedTransactionLost",
        color="red",
        dashed=True,
    )
    picture.arrow((601, 116), (601, 204), color="red", dashed=True)
    picture.text(611, 156, "gone from the database,", size=12, muted=True)
    picture.text(611, 172, "and no proof of its commit", size=12, muted=True)
    return picture


def draw_recovery() -> Picture:
    """Draw the five steps of a new attempt before it reads a record."""
    picture = Picture(
        "Recovery in five steps",
        "A new attempt claims the decision log, which shuts out older attempts. It reads the "
        "last completed checkpoint. It commits the transactions that this checkpoint lists, and "
        "rolls back all other prepared ones. It restores the state. It moves the sources back "
        "to their positions.",
        960,
        220,
    )
    steps: tuple[tuple[str, tuple[str, ...], Color], ...] = (
        ("Claim", ("the decision log:", "older attempts", "are shut out"), "yellow"),
        ("Read", ("the last completed", "checkpoint of", "the log"), "yellow"),
        ("Commit", ("what it lists, and", "roll back all other", "prepared rows"), "green"),
        ("Restore", ("the state of that", "checkpoint in", "new slots"), "purple"),
        ("Go on", ("from the sources’", "positions in that", "checkpoint"), "blue"),
    )
    for number, (name, says, color) in enumerate(steps):
        left = 24 + number * 185
        picture.box(Box(left, 56, 162, 118), name, *says, color=color)
        picture.step(left + 81, 38, number + 1)
        if number < 4:
            picture.arrow((left + 162, 115), (left + 185, 115))
    picture.text(
        480, 202, "After a crash here, the next attempt repeats all five steps.",
        anchor="middle", muted=True,
    )  # fmt: skip
    return picture


def draw_layers() -> Picture:
    """Draw the files of four checkpoints of the heap."""
    picture = Picture(
        "Base and layers of the heap",
        "Checkpoint 1 writes all keys to a base file. Checkpoints 2 and 3 each write the "
        "changed keys to a layer. Each checkpoint names the base and all layers above it. When "
        "the layers have half of the size of the base, or there are 64 files, a checkpoint "
        "writes a new base.",
        960,
        330,
    )
    files: tuple[tuple[str, float, Color], ...] = (
        ("base 1", 110, "purple"),
        ("layer 2", 26, "blue"),
        ("layer 3", 26, "blue"),
    )
    new_base: tuple[tuple[str, float, Color], ...] = (("base 4", 118, "purple"),)
    for checkpoint in range(1, 5):
        left = 40 + (checkpoint - 1) * 230
        picture.text(left + 90, 34, f"checkpoint {checkpoint}", bold=True, anchor="middle")
        bottom = 244.0
        held = files[:checkpoint] if checkpoint < 4 else new_base
        for number, (name, height, color) in enumerate(held):
            new = number == len(held) - 1
            bottom -= height + 6
            picture.box(
                Box(left, bottom, 180, height),
                f"{name}: written now" if new else name,
                color=color,
                dashed=not new,
                size=13,
            )
    picture.arrow((24, 246), (936, 246), head=False)
    picture.text(
        40,
        272,
        "Solid: written by this checkpoint. Dashed: a file of an earlier one, named again.",
        muted=True,
    )
    picture.text(
        40,
        294,
        "A new base is written when layers have half of its size, or at 64 files.",
        muted=True,
    )
    picture.text(
        40,
        316,
        "A restore reads the newest layer first, and at most 1.5 times the state.",
        muted=True,
    )
    return picture
