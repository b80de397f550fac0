"""Pictures of the changes of Postgres: the copy in chunks, the hand-over, the acknowledgement."""

from __future__ import annotations

from docs.pictures.drawing import Box, Color, Picture


def draw_copy() -> Picture:
    """Draw a table that is copied by ranges of its key."""
    picture = Picture(
        "The first copy, chunk by chunk",
        "The table is divided by ranges of its key. Each range is read by one transaction with a "
        "snapshot of its own. The position in a checkpoint has the last key of each range and its "
        "snapshot. The ranges up to key 200,000 are copied and in the position. The third one is "
        "being copied. After a crash the copy goes on after the last key in the position.",
        960,
        300,
    )
    chunks: tuple[tuple[str, str, str, Color, bool], ...] = (
        ("keys to 100,000", "snapshot 710", "copied", "green", False),
        ("keys to 200,000", "snapshot 734", "copied", "green", False),
        ("keys to 300,000", "snapshot 752", "is read now", "yellow", False),
        ("all other keys", "no snapshot yet", "still to be read", "grey", True),
    )
    picture.text(24, 34, "Table orders, by ranges of its key", bold=True)
    for number, (keys, snapshot, state, color, dashed) in enumerate(chunks):
        left = 24 + number * 230
        picture.box(Box(left, 52, 222, 78), keys, snapshot, state, color=color, dashed=dashed)
    for number in range(3):
        picture.arrow((135 + number * 230, 130), (135 + number * 230, 186))
        picture.rows(145 + number * 230, 158, "green", "green", "green")
    picture.box(
        Box(24, 188, 452, 62),
        "Position in the checkpoint",
        "to 100,000: snapshot 710; to 200,000: snapshot 734",
        color="yellow",
    )
    picture.box(Box(484, 188, 222, 62), "Rows with _op = r", "go to the sink", color="purple")
    picture.text(24, 278, "After a crash the copy goes on after key 200,000, in a new snapshot.")
    return picture


def draw_hand_over() -> Picture:
    """Draw which transactions come by the copy, and which by the stream."""
    picture = Picture(
        "From the copy to the stream",
        "A time line of the server's log. The slot is created at S. Later chunk 1 is read in "
        "snapshot C1, and chunk 2 in snapshot C2. The copy ends at E. A transaction that a "
        "chunk's snapshot sees is in the copied rows, and the stream leaves its changes of this "
        "chunk out. All other changes are passed on. After E nothing is left out.",
        960,
        372,
    )
    marks: tuple[tuple[float, str, str], ...] = (
        (150, "S", "the slot begins"),
        (390, "C1", "snapshot of chunk 1"),
        (630, "C2", "snapshot of chunk 2"),
        (800, "E", "the copy is over"),
    )
    picture.arrow((24, 92), (936, 92))
    picture.text(24, 122, "the server’s log", size=12, muted=True)
    for x, name, what in marks:
        picture.arrow((x, 62), (x, 346), head=False, dashed=True)
        picture.text(x, 34, name, bold=True, anchor="middle")
        picture.text(x, 54, what, size=12, muted=True, anchor="middle")
    bars: tuple[tuple[float, float, float, str, str, Color], ...] = (
        (136, 24, 118, "of any chunk", "copied", "green"),
        (136, 160, 222, "changes a key of chunk 1", "C1 sees it: left out", "green"),
        (186, 396, 226, "changes a key of chunk 1", "C1 does not see it: passed on", "blue"),
        (246, 396, 226, "changes a key of chunk 2", "C2 sees it: left out", "green"),
        (306, 638, 156, "of any chunk", "passed on", "blue"),
        (136, 810, 126, "all changes", "passed on", "blue"),
    )
    for y, x, width, first, second, color in bars:
        picture.box(Box(x, y, width, 40), first, second, color=color, size=12)
    picture.text(
        24,
        362,
        "Green: the change is in the copied rows. Blue: it comes by the stream.",
        size=12,
        muted=True,
    )
    return picture


LANES: tuple[tuple[str, float, Color], ...] = (
    ("Postgres", 130, "green"),
    ("Reader", 370, "purple"),
    ("Driver", 610, "yellow"),
    ("Target", 840, "green"),
)


def draw_acknowledgement() -> Picture:
    """Draw when the slot of the server moves."""
    picture = Picture(
        "The slot moves after the decision",
        "Postgres sends changes up to position 0/30 to the reader. The barrier takes the "
        "position 0/30 into checkpoint 7. The driver appends the decision to its log. The target "
        "commits the rows. Only then the reader acknowledges 0/30, and Postgres may delete the "
        "log before it. After a crash before the decision Postgres sends the changes again. After "
        "a crash behind the decision the next attempt commits the rows and reads on from 0/30.",
        960,
        440,
    )
    for name, x, color in LANES:
        picture.box(Box(x - 62, 22, 124, 36), name, color=color)
        picture.arrow((x, 58), (x, 420), head=False, dashed=True)
    postgres, reader, driver, target = (x for _, x, _ in LANES)
    steps: tuple[tuple[float, float, float, str, Color], ...] = (
        (100, postgres, reader, "1  changes up to 0/30", "grey"),
        (150, reader, driver, "2  checkpoint 7 has 0/30", "grey"),
        (250, driver, target, "4  commit", "yellow"),
        (300, driver, reader, "5  checkpoint 7 is complete", "yellow"),
        (350, reader, postgres, "6  acknowledge 0/30", "green"),
    )
    for y, start, end, says, color in steps:
        picture.arrow((start, y), (end, y), color=color)
        picture.text(min(start, end) + 12, y - 8, says)
    picture.text(driver + 12, 190, "3  append the decision", bold=True)
    picture.arrow((24, 204), (936, 204), color="red", head=False)
    picture.text(postgres + 12, 378, "the slot moves, the log", size=12)
    picture.text(postgres + 12, 394, "before 0/30 may go", size=12)
    for y, line in (
        (164, "A crash here: the changes are sent"),
        (180, "again, because the slot has not moved."),
        (228, "A crash here: the next attempt"),
        (244, "commits, and reads on from 0/30."),
    ):
        picture.text(20, y, line, size=12, color="red")
    return picture
