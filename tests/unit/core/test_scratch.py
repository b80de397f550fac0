"""Local files of killed processes are deleted by the next one; a living one's never are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from onceflow.core.local_files import ScratchDirectory, directory_of_process

_PROGRAM = """
import sys, time
from pathlib import Path
from onceflow.core.local_files import ScratchDirectory
scratch = ScratchDirectory.create(Path(sys.argv[1]), "ledger-0")
(scratch.path / "state").write_text("much")
print(scratch.path, flush=True)
time.sleep(300)
"""


def _begin(base: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(base)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_is_deleted_and_a_living_ones_files_stay(tmp_path: Path) -> None:
    killed, left = _begin(tmp_path)
    frozen, kept = _begin(tmp_path)
    with killed, frozen:
        try:
            os.kill(frozen.pid, signal.SIGSTOP)
            killed.kill()
            killed.wait(30)
            assert (left / "state").exists()
            mine = ScratchDirectory.create(tmp_path, "ledger-1")
            assert not left.exists()
            assert (kept / "state").read_text() == "much"
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
                [kept.name, f"{kept.name}.lock", mine.path.name, f"{mine.path.name}.lock"]
            )
            mine.delete()
            mine.delete()
            assert sorted(tmp_path.iterdir()) == [kept, kept.with_name(f"{kept.name}.lock")]
        finally:
            frozen.kill()


def test_files_of_others_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "onceflow-old-0-abc").mkdir()
    (tmp_path / "notes.lock").touch()
    ScratchDirectory.create(tmp_path, "ledger-0").delete()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.lock", "onceflow-old-0-abc"]


def test_one_process_has_one_directory_in_each_place(tmp_path: Path) -> None:
    first, second = directory_of_process(tmp_path / "a"), directory_of_process(tmp_path / "b")
    assert first.is_dir()
    assert first != second
    assert directory_of_process(tmp_path / "a") == first
