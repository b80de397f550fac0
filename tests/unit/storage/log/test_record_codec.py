from __future__ import annotations

import json
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.storage.storage_samples import decision

from onceflow.core.errors import CheckpointCorrupt, InvariantViolation, StateIncompatible
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    InFlight,
    OperatorSnapshot,
    SnapshotTimings,
    StateHandle,
    SubtaskSnapshot,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.log.memory import Decided, LogMemory
from onceflow.core.protocol.log.rules import AttemptClaimed, CheckpointDecided, LogRecord
from onceflow.core.storage.log.record_codec import decode_record, encode_record, seal

T = TypeVar("T")

WHERE = "/storage/ledger/log/000000000002.json"
DECIDED = CheckpointDecided(2, AttemptId(1), decision(5, 1, filler=b"\x00\xfe"), "previous")

counts = st.integers(0, 2**62)
floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(codec="utf-8"))


def tuples_of(item: st.SearchStrategy[T]) -> st.SearchStrategy[tuple[T, ...]]:
    return st.lists(item, max_size=3).map(tuple)


handles = st.builds(
    StateHandle,
    name=texts,
    path=texts,
    size_bytes=counts,
    checksum=texts,
    key_group_first=counts,
    key_group_last=st.integers(-1, 2**62),
    shared=st.booleans(),
    inline=st.binary(),
)
committables = st.builds(
    Committable,
    transaction=st.builds(
        TransactionId,
        st.just("sink"),
        st.integers(0, 9_999),
        st.integers(0, 9_999),
        st.integers(0, 999),
        st.integers(0, 99),
    ),
    rows=counts,
    payload=st.binary(),
)
operators = st.builds(
    OperatorSnapshot,
    uid=texts,
    keyed=tuples_of(handles),
    raw=tuples_of(handles),
    lists=st.dictionaries(texts, tuples_of(st.binary()), max_size=3),
    committables=tuples_of(committables),
)
snapshots = st.builds(
    SubtaskSnapshot,
    subtask=st.builds(SubtaskRef, texts, counts),
    operators=tuples_of(operators),
    timings=st.builds(SnapshotTimings, floats, floats, floats, floats, counts),
    in_flight=tuples_of(st.builds(InFlight, texts, st.booleans(), handles, st.integers(0, 1))),
)
completed = st.builds(
    CompletedCheckpoint,
    checkpoint=counts.map(CheckpointId),
    attempt=counts.map(AttemptId),
    parallelism=counts,
    max_parallelism=counts,
    snapshots=tuples_of(snapshots),
    triggered_at_ms=counts,
    completed_at_ms=counts,
    final=st.booleans(),
)
memories = st.builds(
    LogMemory,
    since=counts,
    decided=tuples_of(st.builds(Decided, counts, counts)),
    sinks=tuples_of(texts),
    committed=tuples_of(committables),
)
records: st.SearchStrategy[LogRecord] = st.one_of(
    st.builds(AttemptClaimed, counts, counts.map(AttemptId), texts, texts, tuples_of(texts)),
    st.builds(CheckpointDecided, counts, counts.map(AttemptId), completed, texts, memories),
)


@given(records)
def test_a_record_reads_back_exactly_as_it_was(record: LogRecord) -> None:
    data, digest = encode_record(record)
    entry = decode_record(data, WHERE)
    assert entry.record == record
    assert entry.digest == digest
    assert encode_record(entry.record) == (data, digest)


def test_a_record_is_two_lines_of_json_that_people_can_read() -> None:
    first, second = encode_record(DECIDED)[0].decode().splitlines()
    assert json.loads(first)["record"]["completed"]["snapshots"][0]["subtask"] == {
        "chain": "balance",
        "index": 0,
    }
    assert json.loads(second)["size_bytes"] == len(first) + 1


def test_format_1_is_these_very_bytes() -> None:
    """Fails when a field of the protocol's values changes: then FORMAT must change with it."""
    data, digest = encode_record(DECIDED)
    begins = (
        b'{"format":1,"kind":"checkpoint_decided","record":{"sequence":2,"attempt":1,"completed":'
        b'{"checkpoint":5,"attempt":1,"parallelism":1,"max_parallelism":128,"snapshots":['
        b'{"subtask":{"chain":"balance","index":0},"operators":[{"uid":"balance","keyed":[],'
        b'"raw":[],"lists":{"splits":["AP8=",""]},"committables":[{"transaction":{"sink_id":"sink",'
        b'"attempt":1,"checkpoint":5,"subtask":0,"sequence":0},"rows":7,"payload":"AP4="}]'
    )
    described = b',"described":{}'
    written = (
        b"}],"
        b'"timings":{"alignment_ms":0.1,"sync_ms":2.5,"async_ms":1e-9,"start_delay_ms":3.0,'
        b'"size_bytes":10'
    )
    adds = b',"uploaded_bytes":0,"in_flight_bytes":0,"overtaken":false},"in_flight":[]'
    times = b'}],"triggered_at_ms":1,"completed_at_ms":2,"final":false'
    ends = (
        b',"delivered_through":0,"undelivered":[]},"previous":"previous"',
        b',"memory":{"since":1,"decided":[],"sinks":[],"committed":[],"savepoint":"","rewound":[]',
        b',"kept":[]}}}',
    )
    told = b',"input_ended":false'
    whole = begins + described + written + adds + times + told + b"".join(ends)
    assert data.splitlines()[0] == whole
    assert decode_record(data, WHERE).digest == digest
    handle = StateHandle("k", "p", 1, "c", 2, 3, True, b"i")
    data, _ = encode_record(CheckpointDecided(2, AttemptId(1), decision(5, 1, (handle,)), ""))
    assert (
        b'{"name":"k","path":"p","size_bytes":1,"checksum":"c","key_group_first":2,'
        b'"key_group_last":3,"shared":true,"inline":"aQ=="}'
    ) in data
    claimed, _ = encode_record(AttemptClaimed(1, AttemptId(1), "host:1", ""))
    assert claimed.splitlines()[0] == (
        b'{"format":1,"kind":"attempt_claimed","record":'
        b'{"sequence":1,"attempt":1,"owner":"host:1","previous":"","sinks":[]}}'
    )


def test_every_flipped_bit_is_noticed() -> None:
    data, _ = encode_record(AttemptClaimed(1, AttemptId(1), "host:1", ""))
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CheckpointCorrupt, match=WHERE):
                decode_record(bytes(damaged), WHERE)


def test_every_cut_and_every_addition_is_noticed() -> None:
    data, _ = encode_record(DECIDED)
    for length in range(len(data)):
        with pytest.raises(CheckpointCorrupt, match=WHERE):
            decode_record(data[:length], WHERE)
    for added in (b"\n", b"\0", b"{}", data):
        with pytest.raises(CheckpointCorrupt, match=WHERE):
            decode_record(data + added, WHERE)


def test_a_damaged_record_is_named_with_both_checksums_and_what_to_do() -> None:
    data, digest = encode_record(DECIDED)
    damaged = data.replace(b"balance", b"bXlance", 1)
    now = seal(damaged.splitlines()[0])[1]
    with pytest.raises(CheckpointCorrupt) as raised:
        decode_record(damaged, WHERE)
    message = str(raised.value)
    assert all(part in message for part in (WHERE, digest, now, "backup", "move this record"))


def test_a_format_of_a_later_version_is_refused_by_number() -> None:
    line = encode_record(DECIDED)[0].splitlines()[0].replace(b'"format":1', b'"format":4')
    with pytest.raises(StateIncompatible, match=r"record format 4, and this .* format 1:"):
        decode_record(seal(line)[0], WHERE)


@pytest.mark.parametrize(
    "line",
    [
        b'{"format":1,"kind":"other","record":{}}',
        b'{"format":1,"kind":"attempt_claimed","record":{}}',
        b'{"format":"1"}',
        b"[]",
        b"",
        b'{"format":1,"kind":"attempt_claimed","record":{"sequence":"1"}}',
    ],
)
def test_a_sealed_line_that_is_no_record_is_refused(line: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match=WHERE):
        decode_record(seal(line)[0], WHERE)


def test_a_record_that_would_not_read_back_is_never_written() -> None:
    broken = SubtaskSnapshot(SubtaskRef("c", 0), (), SnapshotTimings(float("nan")))
    record = CheckpointDecided(
        2,
        AttemptId(1),
        CompletedCheckpoint(CheckpointId(1), AttemptId(1), 1, 1, (broken,), 0, 0),
        "",
    )
    with pytest.raises(InvariantViolation, match="changes when it is encoded"):
        encode_record(record)
