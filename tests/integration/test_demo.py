"""The whole of it, as a stranger runs it: a broker, a target, Spark, and SIGKILL."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1000)]


def _demo(*flags: str) -> tuple[int, dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": str(_ROOT / "src")}
    run = subprocess.run(
        [sys.executable, "-m", "demo", "--json", *flags],
        capture_output=True,
        text=True,
        timeout=950,
        cwd=_ROOT,
        env=environment,
        check=False,
    )
    assert run.returncode in {0, 1}, run.stderr
    return run.returncode, json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_every_payment_is_there_once_after_slot_worker_and_driver_were_killed(
    backend: str,
) -> None:
    code, found = _demo("--records", "400000", "--backend", backend, "--seed", "1")
    assert sorted(kill["what"] for kill in found["kills"]) == ["driver", "slot", "worker"]
    assert found["drivers"] == 2
    assert found["restores"] >= 3
    assert (found["rows"], found["duplicates"], found["missing"]) == (400_000, 0, 0)
    assert (found["wrong_balances"], found["altered"], found["in_doubt"]) == (0, False, 0)
    assert found["ok"] is True
    assert code == 0


@pytest.mark.slow
def test_every_payment_is_there_once_after_both_servers_and_an_executor_were_killed() -> None:
    flags = ("--kill", "postgres", "--kill", "kafka", "--kill", "executor", "--seed", "2")
    code, found = _demo("--records", "400000", *flags)
    assert sorted(kill["what"] for kill in found["kills"]) == ["executor", "kafka", "postgres"]
    assert found["ok"] is True
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sink", "commit_mode"),
    [
        ("mysql", "two_phase"),
        ("mariadb", "two_phase"),
        ("kafka", "auto"),
        # Rows that are staged, and applied after the decision.
        ("postgres", "ledger"),
    ],
)
def test_every_payment_is_there_once_after_the_target_a_slot_and_the_driver_were_killed(
    sink: str, commit_mode: str
) -> None:
    kills = ("--kill", sink, "--kill", "slot", "--kill", "driver", "--seed", "3")
    code, found = _demo("--sink", sink, "--commit-mode", commit_mode, "--records", "100000", *kills)
    assert sorted(kill["what"] for kill in found["kills"]) == sorted((sink, "slot", "driver"))
    assert (found["sink"], found["commit_mode"]) == (sink, commit_mode)
    assert (found["rows"], found["duplicates"], found["missing"]) == (100_000, 0, 0)
    assert (found["wrong_balances"], found["altered"], found["in_doubt"]) == (0, False, 0)
    assert found["ok"] is True
    assert code == 0


@pytest.mark.slow
def test_same_kills_at_least_once_show_duplicates_and_lose_nothing() -> None:
    code, found = _demo("--records", "400000", "--at-least-once", "--seed", "1")
    assert len(found["kills"]) == 3
    assert found["duplicates"] > 0
    assert found["missing"] == 0
    assert found["ok"] is False
    assert code == 1


@pytest.mark.slow
def test_a_job_into_kafka_is_moved_after_many_checkpoints_and_has_every_payment_once() -> None:
    """Kafka proves the last commit of each subtask alone: what was before must move along."""
    flags = ("--sink", "kafka", "--move", "--kill", "slot", "--seed", "1")
    code, found = _demo("--records", "400000", "--interval", "0.2", *flags)
    assert (found["rows"], found["duplicates"], found["missing"]) == (400_000, 0, 0)
    assert (found["wrong_balances"], found["altered"], found["in_doubt"]) == (0, False, 0)
    assert found["ok"] is True
    assert code == 0


@pytest.mark.parametrize(
    "kills", [("slot",), pytest.param(("driver", "slot"), marks=pytest.mark.slow)]
)
def test_a_job_that_crashes_and_is_moved_by_a_savepoint_has_every_payment_once(
    kills: tuple[str, ...],
) -> None:
    """Killed, stopped with a savepoint, then a slot more on the other backend, all of it in S3.

    Of five pieces of 20,000 payments the last one is produced after the move.
    """
    flags = ("--storage", "s3", "--unaligned", "--move", "--backend", "heap", "--seed", "1")
    kill_flags = (part for kill in kills for part in ("--kill", kill))
    code, found = _demo("--records", "100000", "--interval", "0.3", *flags, *kill_flags)
    assert sorted(kill["what"] for kill in found["kills"]) == sorted(kills)
    move = found["move"]
    assert (move["parallelism"], move["backend"]) == ([2, 3], ["heap", "rocksdb"])
    before, after = move["storage"]
    assert move["savepoint"].startswith(f"{before}/demo/savepoints/")
    assert (before.partition(":")[0], after == before) == ("s3", False)
    assert (found["drivers"], found["unaligned"]) == (2 + kills.count("driver"), True)
    assert (found["rows"], found["duplicates"], found["missing"]) == (100_000, 0, 0)
    assert (found["wrong_balances"], found["altered"], found["in_doubt"]) == (0, False, 0)
    assert found["ok"] is True
    assert code == 0


@pytest.mark.slow
def test_a_newcomer_sees_on_the_page_what_is_killed(tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    command = [sys.executable, "-m", "demo", "--json", "--ui", "--records", "300000", "--seed", "1"]
    with said.open("wb") as stderr:
        demo = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT / "src")},
        )
    try:
        seen = _watch_page(demo, said)
        printed, _ = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 0, said.read_text()
    found = json.loads(printed)
    assert found["ok"] is True
    assert found["drivers"] == 2
    states = [state for state, _ in seen]
    assert "running" in states
    assert "its driver is gone" in states, seen
    assert max(attempt or 0 for _, attempt in seen) > found["restores"], seen


def _watch_page(demo: subprocess.Popen[bytes], said: Path) -> list[tuple[str, int | None]]:
    """Return the states and attempts that the page's line of the job has had, in their order."""
    seen: list[tuple[str, int | None]] = []
    while demo.poll() is None:
        words = said.read_text().split()
        if "token:" in words:
            url, token = words[words.index("page:") + 1], words[words.index("token:") + 1]
            request = urllib.request.Request(f"{url}/v1/jobs")
            request.add_header("Authorization", f"Bearer {token}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                with urllib.request.urlopen(request, timeout=20) as response:
                    jobs = json.load(response)["jobs"]
                seen += [(job["state"], job.get("attempt")) for job in jobs]
        time.sleep(0.2)
    return seen
