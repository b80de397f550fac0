"""States that are not kept by key as rows: lists, broadcast entries, bytes by key group."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from tests.spark_formats.state_job import await_all_records_in_a_checkpoint
from tests.spark_formats.state_rows import state
from tests.spark_formats.test_state_formats import listed
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import (
    BroadcastAccess,
    BroadcastProcessFunction,
    Checkpointing,
    JobState,
    ListStateDescriptor,
    LocalProcesses,
    MapStateDescriptor,
    NoRestart,
    OperatorAccess,
    Pipeline,
    ProcessFunction,
    Record,
)
from onceflow.core.api.pipeline import Job
from onceflow.core.errors import ConfigError

RECORDS, RULES, ACCOUNTS = 2_000, 30, 50
LIMITS = MapStateDescriptor[str, int]("limits", str, int)


class Numbered(ProcessFunction):
    """Keeps the ids of its records, and their number, which all subtasks are to get."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def open(self, state: OperatorAccess) -> None:
        self._ids = state.list_state(ListStateDescriptor[int]("ids", int))
        self._counts = state.union_list_state(ListStateDescriptor[dict[str, int]]("counts", dict))

    def process(self, record: Record) -> Record:
        self._ids.add(record["id"])
        return record

    def snapshot_state(self, checkpoint: int) -> None:
        self._counts.update([{"records": len(self._ids.get())}])


class Limited(BroadcastProcessFunction):
    """Keeps the rules, and of each key group how many records it has had, as text."""

    def output_schema(self, records: pa.Schema, broadcast: pa.Schema) -> pa.Schema:
        return records

    def open(self, state: BroadcastAccess) -> None:
        self._limits = state.broadcast_state(LIMITS)
        self._raw = state.raw_keyed_state("records")

    def process(self, record: Record) -> Record:
        group = self._raw.key_group_of(record["account"])
        self._raw.put(group, b"%d" % (int(self._raw.get(group) or b"0") + 1))
        return record

    def process_broadcast(self, record: Record) -> None:
        self._limits.put(f"rule-{record['id']}", record["amount"])


def start(directory: Path) -> Job:
    """Start the job, which goes on after its records until it is stopped."""
    pipeline = Pipeline(
        LocalProcesses(directory / "logs"),
        name="limited",
        parallelism=2,
        max_parallelism=16,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.2),
        restart=NoRestart(),
        settings=SETTINGS,
    )
    ends_with = str(directory / "end")
    rules = pipeline.read(CountingSource(RULES, ends_with=ends_with), uid="rules")
    source = CountingSource(RECORDS, accounts=ACCOUNTS, ends_with=ends_with)
    records = pipeline.read(source, uid="records").process(Numbered(), uid="numbered")
    limited = records.key_by("account").connect(rules.broadcast(LIMITS))
    limited.process(Limited(), uid="limited").write(DirectorySink(str(directory / "out")), uid="o")
    return pipeline.start()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A job's checkpoint storage and a savepoint, both after the same records."""
    directory = tmp_path_factory.mktemp("limited")
    job = start(directory)
    try:
        await_all_records_in_a_checkpoint(job, RECORDS + RULES)
        place = job.savepoint()
        assert job.stop(60).state is JobState.STOPPED
    finally:
        job.cancel()
    return str(directory / "checkpoints"), place


def test_states_that_are_not_kept_by_key_are_rows_of_their_types(places: tuple[str, str]) -> None:
    for place in places:
        ids = state(place, uid="numbered", state="ids")
        assert ids.schema.names == ["subtask", "element", "value"]
        assert ids.schema.types == [pa.int32(), pa.int32(), pa.int64()]
        assert sorted(ids["value"].to_pylist()) == list(range(RECORDS))
        assert set(ids["subtask"].to_pylist()) == {0, 1}
        counts = state(place, uid="numbered", state="counts", valueFormat="json").to_pylist()
        told = [msgspec.json.decode(row["value"])["records"] for row in counts]
        assert (len(told), sum(told)) == (2, RECORDS)
        # Both subtasks have the same entries: those of one are told.
        limits = state(place, uid="limited", state="limits")
        assert limits.schema.names == ["map_key", "value"]
        assert dict(zip(*limits.to_pydict().values(), strict=True)) == {
            f"rule-{number}": number * 7 % 1500 - 500 for number in range(RULES)
        }
        raw = state(place, uid="limited", state="records").to_pylist()
        assert sum(int(row["value"]) for row in raw) == RECORDS
        assert len({row["key_group"] for row in raw}) == len(raw)
        assert {row["key_group"] for row in raw} <= set(range(16))


def test_they_are_listed_with_their_kind_and_types_and_found_by_name(
    places: tuple[str, str],
) -> None:
    last = listed(Path(places[0]))[-1]
    states = {one["uid"]: one["states"] for one in last["operators"]}
    found = [(one["name"], one["kind"], one["type"]) for one in states["numbered"]]
    assert found == [
        ("ids", "operator list", "msgpack/1:int"),
        ("counts", "operator union list", "msgpack/1:dict"),
    ]
    found = [(one["name"], one["kind"], one["type"]) for one in states["limited"]]
    assert found == [
        ("limits", "broadcast", "msgpack/1:str -> msgpack/1:int"),
        ("records", "raw keyed", "raw"),
    ]
    with pytest.raises(ConfigError, match=r"ids \(operator-list\), counts \(union\). Choose one"):
        state(places[1], uid="numbered")
    assert len(state(places[1], uid="numbered", stateType="union")) == 2
    with pytest.raises(ConfigError, match="has no broadcast state 'ids'"):
        state(places[1], uid="numbered", state="ids", stateType="broadcast")
