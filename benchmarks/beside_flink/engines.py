"""The two processes that run jobs, ours and Flink's: the same words to both.

Flink's is a JVM with a local cluster of two slots, built from benchmarks/flink by Maven.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cpu import tree_cpu_s
from benchmarks.stage import ROOT, BenchmarkError
from onceflow.integration.faults.processes import kill_tree

HEAP = "4g"
"""Of Flink's JVM; its RocksDB may use 512 MB besides."""
_PROJECT = ROOT / "benchmarks" / "flink"
_JAVA_MIN = 17
_BUILD_TIMEOUT_S = 600.0
_SILENCE_MAX_S = 240.0
_LOG_TAIL_CHARS = 4000


class Engine:
    """A process that runs one job after the other."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    def begin(self, *words: str | int | Path) -> None:
        """Start a job, as `words` describe it to the process: no word has a space."""
        self._say(" ".join(["run", *map(str, words)]))

    def ask_number(self, question: str) -> int:
        """Return the number with which the process answers; waits as `expect` does.

        Raises:
            BenchmarkError: It answers with something else, or not; quotes the end of its log.
        """
        self._say(question)
        answer = self._read_line()
        if not answer.isdigit():
            raise self._to_error(answer, "a number")
        return int(answer)

    def stop(self) -> None:
        """Return when the job has stopped, with every record that it read through.

        Raises:
            BenchmarkError: It failed.
        """
        self._say("stop")
        self.expect("stopped")

    def take_checkpoint(self) -> None:
        """Return when a checkpoint that is triggered now is complete.

        Raises:
            BenchmarkError: It failed.
        """
        self._say("checkpoint")
        self.expect("checkpointed")

    def cpu_s(self) -> float:
        """Return the seconds that all its processes have used."""
        return tree_cpu_s(self._process.pid)

    def expect(self, word: str, timeout_s: float = _SILENCE_MAX_S) -> None:
        """Return when the process says `word`; one that says nothing for so long is killed.

        Raises:
            BenchmarkError: It says something else, or nothing; quotes the end of its log.
        """
        answer = self._read_line(timeout_s)
        if answer != word:
            raise self._to_error(answer, repr(word))

    def _read_line(self, timeout_s: float = _SILENCE_MAX_S) -> str:
        stdout = self._process.stdout
        assert stdout is not None
        silence = threading.Timer(timeout_s, kill_tree, [self._process.pid])
        silence.start()
        line = stdout.readline().strip()
        silence.cancel()
        return line

    def _to_error(self, answer: str, expected: str) -> BenchmarkError:
        tail = self._log.read_text(errors="replace")[-_LOG_TAIL_CHARS:]
        return BenchmarkError(f"{self.name} said {answer!r} instead of {expected}:\n{tail}")

    def _say(self, line: str) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(line + "\n")
            stdin.flush()
        except OSError as error:
            raise BenchmarkError(f"{self.name} has ended, and was to {line!r}") from error


@contextmanager
def ours(scratch: Path) -> Generator[Engine, None, None]:
    """Yield our process, ready; after the block none of its processes is left."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    # Slots unpickle classes of this package: they need the same path as the driver.
    environment = {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    command = [sys.executable, "-m", "benchmarks.beside_flink.jobs"]
    with _started("onceflow", command, scratch, environment) as engine:
        yield engine


@contextmanager
def flink(scratch: Path, main: str = "Main") -> Generator[Engine, None, None]:
    """Yield a fresh JVM with a local cluster, ready; after the block it is gone.

    `main` is the class that takes its orders, of those in benchmarks/flink.
    """
    target = _PROJECT / "target"
    command = [
        *("java", f"-Xms{HEAP}", f"-Xmx{HEAP}", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"),
        *("-cp", f"{target}/flink-bench.jar:{target}/lib/*", f"onceflow.bench.{main}"),
    ]
    with _started("Flink", command, scratch, {}) as engine:
        yield engine


@contextmanager
def _started(
    name: str, command: Sequence[str], scratch: Path, environment: dict[str, str]
) -> Generator[Engine, None, None]:
    path = scratch / f"{name}.log"
    with path.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    try:
        engine = Engine(name, process, path)
        engine.expect("ready")
        yield engine
    finally:
        kill_tree(process.pid)
        process.wait()


def build_flink() -> None:
    """Return when the Flink jobs are built.

    Raises:
        BenchmarkError: There is no Java 17, or no Maven; or the build failed, which downloads
            Flink the first time.
    """
    version = _said("java", "-version")
    found = re.search(r'version "(\d+)', version)
    if found is None or int(found[1]) < _JAVA_MIN:
        raise BenchmarkError(
            f"Flink needs Java {_JAVA_MIN} or later on the PATH, and `java -version` says"
            f" {version.strip()!r}: install a JDK, or measure without Flink"
        )
    _said("mvn", "-version")
    jar = _PROJECT / "target" / "flink-bench.jar"
    sources = [_PROJECT / "pom.xml", *_PROJECT.glob("src/**/*.java")]
    if jar.exists() and jar.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return
    built = subprocess.run(
        ["mvn", "-q", "-B", "package"],
        cwd=_PROJECT,
        capture_output=True,
        text=True,
        check=False,
        timeout=_BUILD_TIMEOUT_S,
    )
    if built.returncode != 0:
        output = (built.stdout + built.stderr)[-_LOG_TAIL_CHARS:]
        raise BenchmarkError(f"`mvn -q package` in {_PROJECT} failed:\n{output}")


def _said(program: str, question: str) -> str:
    if shutil.which(program) is None:
        raise BenchmarkError(
            f"Flink needs {program!r}, which is not on the PATH: install Maven and a JDK"
            f" {_JAVA_MIN}, or measure without Flink"
        )
    asked = subprocess.run([program, question], capture_output=True, text=True, check=False)
    return asked.stdout + asked.stderr
