"""An output whose reader has ended, or does not keep up."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator

import pytest

from onceflow.core.unread_output import UnreadOutput


@pytest.fixture
def pipe() -> Iterator[tuple[io.FileIO, UnreadOutput]]:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with io.FileIO(reading) as reader, UnreadOutput(writing, "w") as output:
        yield reader, output


def test_data_that_nobody_can_read_is_dropped(pipe: tuple[io.FileIO, UnreadOutput]) -> None:
    reader, output = pipe
    assert output.write(b"read") == 4
    assert not output.is_unread
    reader.close()
    assert output.write(b"unread") == 6
    assert output.is_unread


def test_data_for_a_terminal_that_was_closed_is_dropped() -> None:
    terminal, writing = os.openpty()
    os.close(terminal)
    with UnreadOutput(writing, "w") as output:
        assert output.write(b"unread") == 6
        assert output.is_unread


def test_other_errors_are_raised() -> None:
    with UnreadOutput("/dev/full", "w") as output, pytest.raises(OSError, match="No space left"):
        output.write(b"lost")


def test_a_reader_that_does_not_keep_up_gets_all_and_uses_no_processor(
    pipe: tuple[io.FileIO, UnreadOutput],
) -> None:
    reader, output = pipe
    text = "a line\n" * 100_000
    parts: list[bytes] = []

    def read() -> None:
        time.sleep(0.5)
        while sum(map(len, parts)) < len(text):
            parts.append(reader.read(65_536) or b"")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    began_s = time.thread_time()
    with io.TextIOWrapper(io.BufferedWriter(output)) as stream:
        stream.write(text)
    assert time.thread_time() - began_s < 0.25
    thread.join(60)
    assert b"".join(parts).decode() == text
