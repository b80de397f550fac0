"""Writes what a version leaves: `python -m tests.formats.write 0.1.0`, before it is released.

For each state backend there are two jobs. One is killed between checkpoints, driver first; one is
stopped with a savepoint. Both leave their checkpoint storage and their targets.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.formats.kept_job import BACKENDS, RECORDS, KeptJob

from onceflow import __version__

KEPT = Path(__file__).parent / "kept"


def write(version: str) -> None:
    """Write all archives of this version.

    Raises:
        SystemExit: The version that runs is another one, or its archives are there already.
    """
    if version != __version__:
        sys.exit(f"this is version {__version__}, and not {version}")
    directory = KEPT / version
    if directory.exists():
        sys.exit(f"{directory} is there: what a version has written is not written again")
    directory.mkdir(parents=True)
    for backend in BACKENDS:
        for end in ("killed", "stopped"):
            with tempfile.TemporaryDirectory() as scratch:
                job = KeptJob(Path(scratch), backend)
                ended = subprocess.run(
                    [sys.executable, "-m", "tests.formats.write", end, backend, scratch]
                )
                if ended.returncode != (-signal.SIGKILL if end == "killed" else 0):
                    sys.exit(f"the job that should be {end} ended with {ended.returncode}")
                shutil.rmtree(job.directory / "logs", ignore_errors=True)
                with tarfile.open(directory / f"{end}-{backend}.tar.xz", "w:xz") as archive:
                    archive.add(scratch, ".")


def run(end: str, backend: str, directory: Path) -> None:
    """Run the job for a while, in a process of its own, and end as `end` says."""
    kept = KeptJob(directory, backend)
    job = kept.pipeline(pause_s=0.02).start()
    job.wait_for(checkpoints=3, records=RECORDS // 2)
    if end == "stopped":
        status = job.stop(60, savepoint=True)
        shutil.move(status.savepoints[-1].place, kept.savepoint)
        return
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        write(sys.argv[1])
    else:
        run(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
