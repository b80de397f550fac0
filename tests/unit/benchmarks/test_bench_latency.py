"""Tests the messages between `benchmarks.latency` and Flink's JVM, which a script replaces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.beside_flink.engines import Engine
from benchmarks.flink_latency import FlinkJvm, FlinkSink
from benchmarks.stage import BenchmarkError

ANSWERS = """
import sys
answers = iter(sys.argv[2:])
log = open(sys.argv[1], "w")
for line in sys.stdin:
    print(line, end="", file=log, flush=True)
    if not line.startswith("run "):
        print(next(answers), flush=True)
"""


@contextmanager
def jvm_that_answers(directory: Path, *answers: str) -> Generator[FlinkJvm]:
    log = directory / "log"
    with subprocess.Popen(
        [sys.executable, "-c", ANSWERS, str(log), *answers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield FlinkJvm(Engine("Flink", process, log), directory)
        finally:
            process.kill()


def test_flinks_job_is_awaited_and_stopped(tmp_path: Path) -> None:
    sink = FlinkSink.of_table("postgresql://postgres@127.0.0.1:5432/bench", "rows")
    with jvm_that_answers(tmp_path, "1", "2", "3", "stopped") as jvm:
        job = jvm.start("127.0.0.1:9092", "sent", sink, 25)
        job.wait_for(checkpoints=2)
        assert job.count_checkpoints() == 3
        job.stop()
    run, *questions = (tmp_path / "log").read_text().splitlines()
    word, directory, *words = run.split(" ")
    assert word == "run"
    assert Path(directory).parent == tmp_path
    url = "jdbc:postgresql://127.0.0.1:5432/bench?user=postgres"
    assert words == ["25", "127.0.0.1:9092", "sent", "table", url, "rows"]
    assert questions == ["checkpoints", "checkpoints", "checkpoints", "stop"]


def test_a_job_of_flinks_that_has_failed_is_not_awaited(tmp_path: Path) -> None:
    with jvm_that_answers(tmp_path, "0", "failed: no broker") as jvm:
        job = jvm.start("127.0.0.1:9092", "sent", FlinkSink.of_topic("out"), 25)
        with pytest.raises(BenchmarkError, match="Flink said 'failed: no broker'"):
            job.wait_for(checkpoints=2)
