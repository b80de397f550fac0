"""A process that has imported what tests need besides the project. It forks for each pytest run.

Usage: python tests/mutation/warm.py, in the root of a copy of the project. Requests and answers are
lines of JSON. A fork imports the project anew, so that it sees a mutant.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PROJECT = ("onceflow", "tests", "conftest", "__main__", "__mp_main__")
_POLL_S = 0.01
_MEMORY_MAX = 4 << 30


def main() -> None:
    """Answer each request by `[exit status of pytest, processor time in seconds]`.

    A request is `{"arguments", "output", "timeout_s", "cpu_max_s", "caches"}`.
    """
    sys.path.pop(0)  # The directory of this script: its modules are no top-level modules.
    learned: set[str] = set()
    for line in sys.stdin:
        request = json.loads(line)
        before_s = _sum_cpu_time()
        status, modules = _run(request)
        cpu_s = _sum_cpu_time() - before_s
        if request["caches"]:
            _import(modules - learned)
            learned |= modules
        print(json.dumps([status, cpu_s]), flush=True)  # noqa: T201


def _sum_cpu_time() -> float:
    """Return the processor time of all forks until now."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(request: Mapping[str, Any]) -> tuple[int, set[str]]:
    """Run pytest in a fork; return its exit status and the modules that it imported.

    The status is 1 if the time is over. All processes of the fork's session are killed at the end.
    """
    ends_at = time.monotonic() + request["timeout_s"]
    modules = Path(request["output"]).with_suffix(".modules")
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _run_here(request, modules)

    def stop(_signal: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    # Kept as a zombie until the session is killed, so that no other process gets its id.
    wanted = os.WEXITED | os.WNOWAIT | os.WNOHANG
    while not (ended := os.waitid(os.P_PID, pid, wanted)) and time.monotonic() < ends_at:
        time.sleep(_POLL_S)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    _, code = os.waitpid(pid, 0)
    status = os.waitstatus_to_exitcode(code) if ended else 1
    imported = set(modules.read_text().split()) if modules.exists() else set[str]()
    modules.unlink(missing_ok=True)
    return status, imported


def _run_here(request: Mapping[str, Any], modules: Path) -> None:
    os.setsid()
    # A mutant may never stop to fill a list.
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_MAX, _MEMORY_MAX))
    cpu_max_s = int(request["cpu_max_s"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_max_s, cpu_max_s))
    # The requests belong to the parent.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    to = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(to, 1)
    os.dup2(to, 2)
    caches = request["caches"]
    sys.dont_write_bytecode = not caches
    os.environ["PYTHONDONTWRITEBYTECODE"] = "" if caches else "1"
    status = 3
    try:
        import pytest
        from hypothesis import Phase, settings

        # That a test fails is enough: no smaller example is looked for. The profile of the tests
        # takes this over.
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", phases=phases, database=None)
        settings.load_profile("mutants")
        status = int(pytest.main(request["arguments"]))
        if caches:
            modules.write_text("\n".join(sys.modules))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _import(names: set[str]) -> None:
    """Import the modules that are no part of the project."""
    for name in sorted(names):
        if name.partition(".")[0] in _PROJECT:
            continue
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
