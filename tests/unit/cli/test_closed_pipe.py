"""Commands whose output is piped into a program that stops reading, such as `head`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

_WATCHING = """
import time, typer
from onceflow.cli.closed_pipe import end_if_unread, ignore_closed_pipes
def watch():
    ignore_closed_pipes()
    while True:
        print("running", flush=True)
        end_if_unread()
        time.sleep(0.01)
typer.run(watch)
"""


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        (["config"], ""),
        (["--help"], "1"),
        *(
            pytest.param(arguments, unbuffered, marks=pytest.mark.servers)
            for arguments, unbuffered in (
                *((["config"], "1"), (["--help"], "")),
                *((["config", "--json"], ""), (["config", "--json"], "1")),
                *((["--version"], ""), (["--version"], "1")),
            )
        ),
    ],
)
def test_output_that_nobody_reads_does_not_change_the_exit_status(
    arguments: Sequence[str], unbuffered: str, closed_pipe: int, tmp_path: Path
) -> None:
    """Status 1 says "something is in doubt", "damaged" or "the job failed"."""
    assert _run(arguments, closed_pipe, tmp_path, unbuffered) == (0, "")


def test_messages_that_nobody_reads_do_not_change_the_exit_status(
    closed_pipe: int, tmp_path: Path
) -> None:
    """A job must not count as failed because `tee` has ended, which reads its messages."""
    status = subprocess.run(
        [sys.executable, "-m", "onceflow.cli.main", "run", "missing.toml"],
        stdout=subprocess.DEVNULL,
        stderr=closed_pipe,
        cwd=tmp_path,
        timeout=60,
        check=False,
    ).returncode
    assert status == 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_command_that_prints_repeatedly_ends_with_its_reader(
    unbuffered: str, closed_pipe: int
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _WATCHING],
        stdout=closed_pipe,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.servers)])
def test_output_that_is_read_arrives_whole(unbuffered: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        assert _run(["config", "--json"], writing, tmp_path, unbuffered) == (0, "")
    finally:
        os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as output:
        assert json.loads(output.read())["settings"]


def _run(
    arguments: Sequence[str], output: int, directory: Path, unbuffered: str
) -> tuple[int, str]:
    """Return the exit status of `onceflow`, and its messages."""
    ended = subprocess.run(
        [sys.executable, "-m", "onceflow.cli.main", *arguments],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stderr
