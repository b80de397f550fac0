"""The check of Spark: its JVM, the Python of its executors, and their access to storage."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onceflow
from onceflow.cli.doctor.machine import install_command
from onceflow.cli.doctor.storage import remove_empty
from onceflow.core.protocol.loops.slots import ADDRESS_ADVICE
from onceflow.core.spi.connector import Area, Finding
from onceflow.core.storage import FileSystemStorage
from onceflow.core.storage.filesystems.bucket_settings import is_bucket
from onceflow.core.storage.filesystems.webhdfs import is_hdfs

CLOCK_SKEW_MAX_S = 5.0
_ERROR_LENGTH_MAX = 600


@dataclass(frozen=True, slots=True)
class SparkQuestion:
    """The Spark cluster to check, and the parameters of the check."""

    master: str | None
    parallelism: int
    storage: str | None
    timeout_s: float
    missing: Sequence[Path] = ()
    """The directories of `storage` that do not exist, and must not exist after the check."""
    conf: Mapping[str, str] = field(default_factory=dict[str, str])


def check_spark(question: SparkQuestion) -> Sequence[Finding]:
    """Run a session in a separate process, run a probe on every executor, and end the session.

    At the timeout, the process and its child processes are killed.
    """
    area = Area("spark")
    with tempfile.TemporaryDirectory(prefix="onceflow-doctor-") as directory:
        answer = Path(directory) / "answer.json"
        with _Shared(question.storage, question.missing) as shared:
            settings = {
                "master": question.master or f"local[{max(2, question.parallelism)}]",
                "conf": dict(question.conf),
                "tasks": max(2, question.parallelism),
                "probe": shared.probe,
                "token": shared.token,
            }
            # Measure around the whole run: a clock is wrong only if it is before the start or after
            # the end.
            began = time.time()
            output = _run(settings, answer, question.timeout_s)
            ended = time.time()
        if not answer.exists():
            return [
                area.problem(
                    f"Spark does not start: {_last_words(output) or 'no answer'}",
                    f"a session on master {settings['master']}",
                    "first fix the findings of the Java check; then see where it stops: pyspark"
                    f" --master '{settings['master']}'",
                )
            ]
        facts = json.loads(answer.read_text(encoding="utf-8"))
    return [
        *_session(area, facts, question.parallelism),
        *_executors(Area("executors"), facts, (began, ended)),
        *check_addresses(facts),
        *(_check_shared_storage(facts, shared) if shared.asked else ()),
    ]


class _Shared:
    """A probe file in checkpoint storage. Executors read it, and write files into its directory."""

    def __init__(self, storage: str | None, missing: Sequence[Path]) -> None:
        self.token = secrets.token_hex(8)
        self.probe = ""
        self.trouble = ""
        # A bucket or an HDFS is the same for every executor with the credentials, so it needs no
        # probe.
        self.asked = storage is not None and not (is_bucket(storage) or is_hdfs(storage))
        self._storage = storage if self.asked else None
        self._directory: Path | None = None
        self._missing = missing

    def __enter__(self) -> _Shared:
        if self._storage is None:
            return self
        root = Path(FileSystemStorage(self._storage).root)
        try:
            self._directory = root / f".onceflow-doctor-{self.token}"
            self._directory.mkdir(parents=True)
            probe = self._directory / "probe"
            probe.write_text(self.token, encoding="ascii")
            self.probe = str(probe)
        except OSError as error:
            self.trouble = str(error.strerror)
        return self

    def __exit__(self, *_: object) -> None:
        if self._directory is None:
            return
        with suppress(OSError):
            for path in self._directory.iterdir():
                path.unlink()
            # Do not delete recursively: other content would belong to another program.
            self._directory.rmdir()
        remove_empty(self._missing)


def _run(settings: Mapping[str, Any], answer: Path, timeout_s: float) -> str:
    """Run the probe. Return its output, which explains a missing answer."""
    # The probe must run this onceflow, not another installed one.
    source = str(Path(onceflow.__file__).resolve().parents[1])
    paths = [source, os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "onceflow.cli.doctor.spark_probe"),
            *(json.dumps(settings), str(answer)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    try:
        printed, _ = process.communicate(timeout=timeout_s)
        return printed
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s; give a longer --timeout"
    finally:
        # Kill the process group: the JVM may outlive its parent.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _last_words(printed: str) -> str:
    """Return the last error that a failed start has printed."""
    lines = [line for line in printed.splitlines() if line.strip()]
    # The last error at the start of a line is the cause. Earlier errors are from retries, and
    # indented lines are stack traces.
    errors = [n for n, line in enumerate(lines) if line[0] not in " \t" and "Error" in line]
    return " ".join(lines[errors[-1] if errors else 0 :])[-_ERROR_LENGTH_MAX:].strip()


def _session(area: Area, answer: Mapping[str, Any], parallelism: int) -> list[Finding]:
    findings = [area.ok(f"Spark {answer['spark']} on {answer['master']}")]
    for name, why in (
        ("spark.dynamicAllocation.enabled", "would remove executors from a running job"),
        ("spark.speculation", "would run a slot a second time"),
    ):
        if answer["conf"][name] == "true":
            remedy = f"start the session with {name}=false"
            findings.append(area.problem(f"{name}=true {why}", f"{name}=false", remedy))
    # 0 means unknown, or that there is no executor yet.
    if 0 < answer["slots"] < parallelism:
        findings.append(
            area.problem(
                f"{answer['slots']} task slots",
                f"{parallelism} task slots at once, one for each parallel subtask",
                f"--master 'local[{parallelism}]'"
                if str(answer["master"]).startswith("local[")
                else f"give the application {parallelism} cores (spark.cores.max), add executors,"
                " or lower the parallelism",
            )
        )
    return findings


def _executors(area: Area, answer: Mapping[str, Any], asked: tuple[float, float]) -> list[Finding]:
    if answer["error"]:
        return [
            area.problem(
                f"Python does not run on the executors: {answer['error'][:_ERROR_LENGTH_MAX]}",
                "the driver's Python on every executor",
                "set PYSPARK_PYTHON to it, or ship it: --archives environment.tar.gz",
            )
        ]
    driver: dict[str, str] = answer["driver"]
    findings: list[Finding] = []
    for host, executor in {entry["host"]: entry for entry in answer["executors"]}.items():
        differing = [
            f"{name} {version}, the driver {driver[name]}"
            for name, version in executor["versions"].items()
            if version != driver[name]
        ]
        if differing:
            findings.append(
                area.problem(
                    f"{host} ({executor['executable']}) has {'; '.join(differing)}",
                    "the driver's versions on every executor",
                    install_command(executor["executable"], driver),
                )
            )
        else:
            listed = ", ".join(f"{name} {version}" for name, version in driver.items())
            findings.append(area.ok(f"{host}: {listed}, as the driver"))
        skew_s = max(asked[0] - executor["time"], executor["time"] - asked[1], 0.0)
        if skew_s > CLOCK_SKEW_MAX_S:
            findings.append(
                area.warning(
                    f"the clock of {host} differs by {skew_s:.0f} s",
                    f"clocks within {CLOCK_SKEW_MAX_S:g} s",
                    "sudo timedatectl set-ntp true",
                )
            )
    return findings


def check_addresses(answer: Mapping[str, Any]) -> list[Finding]:
    """Return findings on the slots' addresses; none if all slots are on one machine."""
    if answer["one_machine"]:
        return []
    area, findings = Area("addresses"), list[Finding]()
    owners: dict[str, tuple[str, str]] = {}
    for executor in answer["executors"]:
        host, reached = executor["host"], executor["reached"]
        if reached is None:
            continue
        at, network_id = reached.get("at", ""), reached.get("network_id", "")
        owner, owner_id = owners.setdefault(at, (host, network_id)) if at else (host, network_id)
        if trouble := reached.get("trouble"):
            mistake = f"{host}: {trouble}"
        elif reached["loopback"]:
            mistake = f"slots on {host} would listen at {at}, which other machines cannot reach"
        elif "" not in {owner_id, network_id} and owner_id != network_id:
            mistake = f"slots on {owner} and on {host} would both listen at {at}"
        else:
            findings.append(area.ok(f"slots on {host} would listen at {at}"))
            continue
        needed = "a different address for each machine"
        findings.append(area.problem(mistake, needed, ADDRESS_ADVICE))
    return list(dict.fromkeys(findings))


def _check_shared_storage(answer: Mapping[str, Any], shared: _Shared) -> list[Finding]:
    area = Area("storage on executors")
    if shared.trouble:
        # The check of the storage itself reports the problem and its remedy.
        return [area.problem(f"not tried: the driver cannot write ({shared.trouble})", "", "")]
    findings: list[Finding] = []
    for host, executor in {entry["host"]: entry for entry in answer["executors"]}.items():
        if executor["storage_read"] != shared.token:
            findings.append(
                area.problem(
                    f"{host} does not see the file that the driver wrote"
                    f" ({executor['storage_read']})",
                    "one directory that the driver and every executor share",
                    "mount the same file system at the same path on every machine",
                )
            )
        elif executor["storage_written"] != shared.token:
            findings.append(
                area.problem(
                    f"{host} cannot write: {executor['storage_written']}",
                    "write permission for the executors' user",
                    "run executors as the driver's user, or give both a group with g+ws",
                )
            )
        else:
            findings.append(area.ok(f"{host} reads and writes it"))
    return findings
