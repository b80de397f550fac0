"""The pipeline that the runtime's tests run, and what must come out of it whatever happens."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource, amount_of
from tests.support.directory_sink import DirectorySink
from tests.support.program import Program, python

from onceflow import (
    Checkpointing,
    FileSystemStorage,
    FixedDelay,
    HeapBackend,
    JobListener,
    LocalProcesses,
    Pipeline,
    RuntimeSettings,
    count,
    sum_,
)
from onceflow.core.protocol.restart import RestartStrategy
from onceflow.core.state import StateBackend
from onceflow.core.storage import CheckpointStorage

# The first slots on Spark wait for its workers to start, which takes a busy machine long. There a
# slot that lives may be silent for long, too, and tests count the restarts of a job.
SETTINGS = RuntimeSettings(start_timeout_s=90, heartbeat_timeout_s=60)


def ledger(
    cluster: AnyCluster,
    directory: Path,
    source: CountingSource,
    *,
    sink: DirectorySink | None = None,
    name: str = "ledger",
    parallelism: int = 2,
    interval: float | None = 0.1,
    timeout: float = 600.0,
    tolerable_failures: int = 0,
    backend: StateBackend | None = None,
    restart: RestartStrategy | None = None,
    max_parallelism: int | None = None,
    mode: str = "exactly_once",
    sink_id: str | None = None,
    settings: RuntimeSettings = SETTINGS,
    listeners: Sequence[JobListener] = (),
    storage: CheckpointStorage | None = None,
    inline_threshold_bytes: int = 20_000,
) -> tuple[Pipeline, DirectorySink]:
    """Build source -> running balance -> directory, all under `directory`."""
    sink = sink or DirectorySink(str(directory / "out"))
    pipeline = Pipeline(
        cluster,
        name=name,
        parallelism=parallelism,
        max_parallelism=max_parallelism,
        checkpointing=Checkpointing(
            storage=storage
            or FileSystemStorage(
                str(directory / "checkpoints"), inline_threshold_bytes=inline_threshold_bytes
            ),
            interval=interval,
            timeout=timeout,
            tolerable_failures=tolerable_failures,
            mode=mode,
        ),
        state_backend=backend or HeapBackend(),
        restart=restart or FixedDelay(attempts=20, delay_s=0.01),
        settings=settings,
        listeners=listeners,
    )
    records = pipeline.read(source, uid="records")
    balances = records.key_by("account").running(balance=sum_("amount"), n=count(), uid="balance")
    balances.write(sink, uid="ledger", sink_id=sink_id)
    return pipeline, sink


def ledger_process(cluster: AnyCluster, directory: Path, source: CountingSource) -> Program:
    """Run the same pipeline in a process of its own, with a cluster of that kind of its own."""
    return Program(
        directory / "driver.log",
        *python("-m", "tests.support.ledger_process", directory),
        *("--records", source.records, "--pause-s", source.pause_s),
        *("--master", "" if isinstance(cluster, LocalProcesses) else "local[2]"),
    )


def assert_exactly_once(sink: DirectorySink, source: CountingSource) -> None:
    """Every record once, every account's balances a chain, nothing in doubt."""
    rows = sink.rows()
    seen = Counter(row["id"] for row in rows)
    assert [record for record, times in seen.items() if times > 1] == []
    assert sorted(seen) == list(range(source.records))
    chains: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for row in rows:
        assert row["amount"] == amount_of(row["id"])
        chains[row["account"]].append((row["n"], row["amount"], row["balance"]))
    for account, chain in chains.items():
        total = 0
        for position, (n, amount, balance) in enumerate(sorted(chain), start=1):
            total += amount
            assert (n, balance) == (position, total), f"account {account} at {position}"
    assert sink.prepared() == []
