"""Driver and slots of a job write lines of JSON, while a slot and then the driver are killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.program import Program, python


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines that are whole; each must be JSON."""
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def await_line(path: Path, matches: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 90
    while True:
        for line in read_lines(path):
            if matches(line):
                return line
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.05)


@pytest.mark.only_proof
def test_each_line_says_whose_it_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    driver = Program(
        log,
        *python("-m", "tests.support.ledger_process", tmp_path),
        *("--records", "1000000", "--pause-s", "0.01"),
        environment={
            "ONCEFLOW_LOGGING_FORMAT": "json",
            "ONCEFLOW_LOGGING_LEVEL": "info",
            "ONCEFLOW_LOGGING_LEVELS": "onceflow.events=debug",
        },
    )
    with driver:
        acked = await_line(log, lambda line: "has acked" in line["message"])
        assert (acked["job"], acked["attempt"], acked["logger"]) == (
            "ledger",
            1,
            "onceflow.events",
        )
        assert {"checkpoint", "subtask", "time", "level", "process"} <= acked.keys()
        await_line(log, lambda line: "is decided" in line["message"])
        joined = await_line(log, lambda line: "has joined" in line["message"])
        os.kill(int(joined["message"].partition("process ")[2].split()[0]), signal.SIGKILL)
        restart = await_line(log, lambda line: line["message"].startswith("restart in"))
        assert (restart["job"], restart["error"]) == ("ledger", "SlotLost")
        assert restart["level"] == "warning"
        await_line(log, lambda line: line.get("attempt") == 2 and "is decided" in line["message"])
    # Slots that have lost their driver say so, and whose they are.
    exits = await_line(log, lambda line: line["logger"] == "onceflow.runtime.slot")
    assert (exits["job"], exits["attempt"]) == ("ledger", 2)
    assert exits["slot"] in {0, 1}
    assert exits["process"] != driver.pid
