"""One measured job in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks.changes.baselines import Taken
from benchmarks.changes.job import ChangesResult, ChangesSpec
from benchmarks.stage import ROOT, BenchmarkError

_TIMEOUT_S = 900.0


def run_job(directory: Path, url: str, slot: str, table: str, rows: int, *, copies: bool) -> Taken:
    """Read `rows` rows of `table` or of `slot` by a job, and return its times.

    Raises:
        BenchmarkError: The job failed; quotes what it said.
    """
    own = directory / slot
    own.mkdir()
    spec, result, log = own / "spec.json", own / "result.json", own / "log"
    description = ChangesSpec(
        url=url, slot=slot, table=table, rows=rows, copies=copies, directory=str(own)
    )
    spec.write_bytes(msgspec.json.encode(description))
    command = [sys.executable, "-m", "benchmarks.changes.job", str(spec), str(result)]
    with log.open("wb") as output:
        status = subprocess.run(
            command, cwd=ROOT, stdout=output, stderr=output, check=False, timeout=_TIMEOUT_S
        ).returncode
    if not result.exists():
        tail = log.read_text(errors="replace")[-2_000:]
        raise BenchmarkError(f"the job of {slot} ended with {status}:\n{tail}")
    measured = msgspec.json.decode(result.read_bytes(), type=ChangesResult)
    return Taken(measured.seconds, measured.cpu_s)
