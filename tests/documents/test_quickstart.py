"""The quickstart, followed word for word by somebody who has only Python and Java."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "quickstart.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_END = "what the block printed ends here"


class Terminal:
    """One shell, in which blocks are typed one after the other."""

    def __init__(self, directory: Path) -> None:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "PYSPARK", "ONCEFLOW", "VIRTUAL_ENV", "SPARK"))
        }
        # `python3` is that of these tests, without what is installed beside it.
        python = Path(sys.base_prefix) / "bin"
        environment["PATH"] = f"{python}{os.pathsep}/usr/local/bin:/usr/bin:/bin"
        if home := os.environ.get("JAVA_HOME"):
            environment["JAVA_HOME"] = home
        self._shell = subprocess.Popen(
            ["bash", "--norc"],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def type(self, block: str) -> str:
        """Run the lines of `block`; return what they print."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{block}\necho '{_END}'\n")
        self._shell.stdin.flush()
        printed = ""
        for line in self._shell.stdout:
            if line.strip() == _END:
                return printed
            printed += line
        raise AssertionError(f"the shell is gone; it printed: {printed}")

    def close(self) -> None:
        with self._shell:
            os.killpg(self._shell.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(900)  # it installs Spark
def test_a_stranger_follows_the_quickstart_word_for_word_and_has_every_row_once(
    tmp_path: Path,
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    install, *commands = [body for kind, body in _BLOCK.findall(page) if kind == "bash"]
    job, check = [body for kind, body in _BLOCK.findall(page) if kind == "python"]
    last_line = next(body for kind, body in _BLOCK.findall(page) if kind == "text")
    start, watch, kill, count, start_again, count_at_the_end = commands
    terminal = Terminal(tmp_path)
    try:
        assert "ERROR" not in terminal.type(install.replace("/path/to/onceflow", str(ROOT)))
        (tmp_path / "payments" / "payments.py").write_text(job)
        (tmp_path / "payments" / "count.py").write_text(check)
        terminal.type(start)
        rows = 0
        deadline = time.monotonic() + 120
        while rows == 0:
            assert time.monotonic() < deadline, f"{rows} rows were seen"
            seen = terminal.type(watch)
            if found := re.search(r"(\d+) rows, (\d+) different payments, 0 wrong", seen):
                rows = int(found[1])
                assert found[1] == found[2], seen
                assert "payments" in seen, seen
        terminal.type(kill)
        seen = terminal.type(count)
        found = re.search(r"(\d+) rows, (\d+) different payments, 0 wrong", seen)
        assert found, seen
        assert found[1] == found[2], seen
        assert int(found[1]) < 60_000, "it was killed too late"
        finished = terminal.type(start_again)
        assert terminal.type(count_at_the_end) == last_line, finished
    finally:
        terminal.close()
