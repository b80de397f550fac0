"""Two streams in one function, broadcast state and state without keys, through whatever happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from examples.enrichment import LIMITS, WithinLimit, WithTier, enrich
from tests.runtime.test_union import WALKS, begin
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource, amount_of
from tests.support.directory_sink import DirectorySink
from tests.support.held_up import await_checkpoint, kill_a_slot, killed_and_rescaled
from tests.support.scripted_sink import ScriptedSink, throttled_sink
from tests.support.waiting import await_status

from onceflow import (
    BroadcastAccess,
    BroadcastProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OperatorAccess,
    Pipeline,
    ProcessFunction,
    Record,
    StateBackend,
    StateTtlConfig,
    ValueStateDescriptor,
)
from onceflow.core.api.pipeline import Job
from onceflow.core.errors import ConfigError, StateIncompatible, UserFunctionError


def await_rows(job: Job, sink: DirectorySink, count: int) -> None:
    await_status(job, lambda s: s.checkpoints_completed > 0 and len(sink.rows()) >= count)


PAYMENTS = CountingSource(4_000, splits_count=3, batch_rows=20)
ACCOUNTS = CountingSource(PAYMENTS.accounts, batch_rows=5, pause_s=0.02)
TIERS = 10
LIMIT_SOURCE = CountingSource(TIERS, batch_rows=1, pause_s=0.02)


def tier_of(account: str) -> str:
    return f"tier-{int(account) % TIERS}"


def limit_of(number: int) -> int:
    return number * 100


def enriching(
    cluster: AnyCluster,
    directory: Path,
    *,
    backend: StateBackend | None = None,
    parallelism: int = 2,
    unaligned: bool = False,
) -> tuple[Pipeline, ScriptedSink]:
    sink = throttled_sink(directory / "out")
    pipeline = begin(
        cluster, directory, backend=backend, parallelism=parallelism, unaligned=unaligned
    )
    payments = pipeline.read(PAYMENTS, uid="payments")
    tiers = pipeline.read(ACCOUNTS, uid="accounts").map(
        lambda record: {"account": record["account"], "tier": tier_of(record["account"])},
        schema="account STRING, tier STRING",
    )
    limits = pipeline.read(LIMIT_SOURCE, uid="limits-in").map(
        lambda record: {"tier": f"tier-{record['id']}", "limit": limit_of(record["id"])},
        schema="tier STRING, limit BIGINT",
    )
    enrich(payments, tiers, limits).write(sink, uid="out")
    return pipeline, sink


@WALKS
@pytest.mark.only_proof
def test_payments_are_enriched_once_through_kills_and_rescaling(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend, unaligned: bool
) -> None:
    rows = killed_and_rescaled(
        lambda parallelism: enriching(
            cluster, tmp_path, backend=backend, parallelism=parallelism, unaligned=unaligned
        ),
        unaligned=unaligned,
    )
    assert Counter(row["id"] for row in rows) == Counter(range(PAYMENTS.records))
    for row in rows:
        assert row["tier"] == tier_of(row["account"])
        limit = limit_of(int(row["account"]) % TIERS)
        assert row["within_limit"] in (None, amount_of(row["id"]) <= limit)
    assert any(row["within_limit"] is not None for row in rows)


class Sizes(BroadcastProcessFunction):
    """Emits how many entries the broadcast state has, for each record and each broadcast one.

    The latter have negative ids.
    """

    def output_schema(self, records: pa.Schema, broadcast: pa.Schema) -> pa.Schema:
        return pa.schema([("id", pa.int64()), ("size", pa.int64())])

    def open(self, state: BroadcastAccess) -> None:
        self.limits = state.broadcast_state(LIMITS)

    def process(self, record: Record) -> Record:
        return {"id": record["id"], "size": len(list(self.limits.keys()))}

    def process_broadcast(self, record: Record) -> Record | None:
        self.limits.put(str(record["id"]), record["id"])
        return {"id": -1 - record["id"], "size": len(list(self.limits.keys()))}


def sized(
    cluster: AnyCluster,
    directory: Path,
    *,
    rules: CountingSource,
    records: CountingSource,
    parallelism: int = 2,
    keyed: bool = True,
    function: BroadcastProcessFunction | None = None,
    restart: bool = True,
    **more: Any,
) -> tuple[Pipeline, DirectorySink]:
    sink = DirectorySink(str(directory / "out"))
    pipeline = begin(cluster, directory, parallelism=parallelism, restart=restart, **more)
    stream = pipeline.read(records, uid="records")
    broadcast = pipeline.read(rules, uid="rules").broadcast(LIMITS)
    connected = stream.key_by("account").connect(broadcast) if keyed else stream.connect(broadcast)
    connected.process(function or Sizes(), uid="sized").write(sink, uid="out")
    return pipeline, sink


@pytest.mark.parametrize(
    "keyed", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["keyed", "unkeyed"]
)
def test_broadcast_state_is_the_same_on_every_subtask_whatever_it_is_restored_at(
    cluster: AnyCluster, tmp_path: Path, keyed: bool
) -> None:
    """All rules come before the first stop; records of the later runs must see all of them."""
    rules = CountingSource(30, ends_with=str(tmp_path / "ends"))
    savepoint: str | None = None
    for step, parallelism in enumerate((2, 3, 1)):
        before, count = 200 * step, 200 * (step + 1)
        records = CountingSource(count, ends_with=str(tmp_path / "ends"))
        pipeline, sink = sized(
            cluster, tmp_path, rules=rules, records=records, parallelism=parallelism, keyed=keyed
        )
        job = pipeline.start(from_savepoint=savepoint) if savepoint else pipeline.start()
        # Two subtasks of the first run have told of each rule.
        await_rows(job, sink, count + 2 * rules.records)
        kill_a_slot(job, step)
        savepoint = job.stop(60, savepoint=str(tmp_path / f"kept-{step}")).savepoints[-1].place
        rows = sink.rows()
        expected = Counter(range(count)) + Counter([*range(-rules.records, 0)] * 2)
        assert Counter(row["id"] for row in rows) == expected
        if step:
            assert {row["size"] for row in rows if row["id"] >= before} == {rules.records}


class WritesOnTheWrongSide(Sizes):
    def process(self, record: Record) -> Record:
        self.limits.put("a", 1)
        return super().process(record)


class AsksForAnother(Sizes):
    def open(self, state: BroadcastAccess) -> None:
        self.limits = state.broadcast_state(MapStateDescriptor("limits", str, str))


class UsesAKeyThatIsNot(Sizes):
    def open(self, state: BroadcastAccess) -> None:
        super().open(state)
        self.seen = state.value_state(ValueStateDescriptor("seen", int))

    def process_broadcast(self, record: Record) -> Record | None:
        self.seen.set(1)
        return None


@pytest.mark.parametrize(
    ("function", "keyed", "says"),
    [
        (WritesOnTheWrongSide(), True, r"'sized'.*'limits' can only be read here"),
        (AsksForAnother(), True, r"uses broadcast state .* use one descriptor for both"),
        (UsesAKeyThatIsNot(), True, r"'sized'.*in process_broadcast\(\), where no key is set"),
        (UsesAKeyThatIsNot(), False, r"uses value_state\(\), but its stream has no keys"),
    ],
    ids=["wrong side", "other descriptor", "no key", "not keyed"],
)
def test_mistakes_with_broadcast_state_are_told_by_name(
    cluster: AnyCluster,
    tmp_path: Path,
    function: BroadcastProcessFunction,
    keyed: bool,
    says: str,
) -> None:
    source = CountingSource(50)
    pipeline, _ = sized(
        cluster,
        tmp_path,
        rules=source,
        records=source,
        keyed=keyed,
        function=function,
        restart=False,
    )
    with pytest.raises((UserFunctionError, ConfigError), match=says):
        pipeline.run(60)


def test_streams_that_cannot_be_connected_are_refused_by_name(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, other = begin(cluster, tmp_path), begin(cluster, tmp_path)
    records = pipeline.read(CountingSource(10), uid="records")
    with pytest.raises(ConfigError, match="by account string, and the second by id int64"):
        records.connect(records).key_by("account", "id")
    with pytest.raises(ConfigError, match="'nobody'.*no such column"):
        records.connect(records).key_by("account", "nobody")
    with pytest.raises(ConfigError, match="two pipelines"):
        records.connect(other.read(CountingSource(10), uid="records")).key_by("id", "id")
    with pytest.raises(ConfigError, match="two states are named 'limits'"):
        records.broadcast(LIMITS, MapStateDescriptor("limits", str, str))
    with pytest.raises(ConfigError, match="needs the descriptor"):
        records.broadcast()
    with pytest.raises(ConfigError, match="is a MapStateDescriptor"):
        records.broadcast(ValueStateDescriptor("limits", int))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'limits' has a time to live"):
        records.broadcast(MapStateDescriptor("limits", str, str, ttl=StateTtlConfig(1)))
    connected = records.connect(records).key_by("account", "account")
    connected.process(WithTier(), uid="tiers")
    with pytest.raises(ConfigError, match="uid 'tiers' is used twice"):
        records.connect(records.broadcast(LIMITS)).process(WithinLimit(), uid="tiers")


class Buffering(ProcessFunction):
    """Passes on all but the last records of its subtask, which it keeps in a list state.

    Emits what was kept when the next record comes, and how many subtasks have begun in all.
    """

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema.append(pa.field("begun", pa.int64()))

    def open(self, state: OperatorAccess) -> None:
        self._kept = state.list_state(ListStateDescriptor("kept", dict))
        self._begun = state.union_list_state(ListStateDescriptor("begun", int))
        self._buffer: list[Record] = self._kept.get()
        total = sum(self._begun.get())
        assert state.is_restored == bool(total), (state.is_restored, total)
        assert 0 <= state.subtask < state.parallelism
        # One subtask keeps what all have counted; each counts itself.
        self._mine = 1 + (total if state.subtask == 0 else 0)
        self._total = total

    def process(self, record: Record) -> Iterable[Record]:
        self._buffer.append(record)
        go, self._buffer = self._buffer[:-7], self._buffer[-7:]
        return [one | {"begun": self._total} for one in go]

    def snapshot_state(self, checkpoint: int) -> None:
        self._kept.update(self._buffer)
        self._begun.update([self._mine])


def buffering(
    cluster: AnyCluster, directory: Path, source: CountingSource, parallelism: int
) -> tuple[Pipeline, DirectorySink]:
    sink = DirectorySink(str(directory / "out"))
    pipeline = begin(cluster, directory, parallelism=parallelism)
    pipeline.read(source, uid="records").process(Buffering(), uid="buffer").write(sink, uid="out")
    return pipeline, sink


def test_lists_without_a_key_are_dealt_out_or_given_to_all_through_kills_and_rescaling(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """Each element comes out once. All subtasks know the count of begun subtasks, a union."""
    begun = 0
    rows: list[Record] = []
    for step, parallelism in enumerate((2, 3, 1)):
        before, count = 2_000 * step, 2_000 * (step + 1)
        source = CountingSource(count, ends_with=str(tmp_path / "ends"))
        pipeline, sink = buffering(cluster, tmp_path, source, parallelism)
        job = pipeline.start()
        await_checkpoint(job)
        kill_a_slot(job, step)
        await_rows(job, sink, count - 7 * parallelism)
        job.stop(60)
        rows = sink.rows()
        assert max(Counter(row["id"] for row in rows).values()) == 1
        assert min(row["begun"] for row in rows if row["id"] >= before) >= begun
        begun += 2 * parallelism  # of both attempts
    assert len(rows) >= 6_000 - 7


class Forgetful(Buffering):
    """Does not ask for what it has kept."""

    def open(self, state: OperatorAccess) -> None:
        self._buffer = []
        self._total = self._mine = 0
        self._begun = state.union_list_state(ListStateDescriptor("begun", str))

    def snapshot_state(self, checkpoint: int) -> None:
        pass


class Forgotten(Forgetful):
    def open(self, state: OperatorAccess) -> None:
        self._buffer = []
        self._total = self._mine = 0
        self._begun = state.union_list_state(ListStateDescriptor("begun", int))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (Forgetful(), "union state 'begun' of operator 'buffer' was written as .*int.* as .*str"),
        (Forgotten(), "'buffer' declares no state 'kept', but its checkpoint holds"),
    ],
    ids=["another type", "not asked for"],
)
def test_lists_that_are_not_asked_for_as_before_are_refused_by_name(
    cluster: AnyCluster, tmp_path: Path, function: ProcessFunction, says: str
) -> None:
    source = CountingSource(100, ends_with=str(tmp_path / "ends"))
    pipeline, sink = buffering(cluster, tmp_path, source, 2)
    job = pipeline.start()
    await_status(job, lambda s: len(s.history) >= 2)
    job.stop(60)
    pipeline = begin(cluster, tmp_path, restart=False)
    pipeline.read(source, uid="records").process(function, uid="buffer").write(sink, uid="out")
    with pytest.raises(StateIncompatible, match=says):
        pipeline.run(60)
