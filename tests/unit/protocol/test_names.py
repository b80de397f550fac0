"""Transaction and sink ids: unique, bounded, and never somebody else's (S24, S25)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.core.errors import InvariantViolation, require, unreachable
from onceflow.core.protocol import ids
from onceflow.core.spi import TransactionNamer, WriterContext

names = st.text(min_size=1, max_size=60)


def test_largest_transaction_id_fits_the_narrowest_database() -> None:
    """S24: MySQL's gtrid takes 64 bytes."""
    largest = ids.TransactionId("s" * 32, 99_999_999, 9_999_999_999, 32_767, 999)
    assert len(str(largest).encode()) <= ids.TRANSACTION_ID_LENGTH_MAX
    assert ids.TransactionId.parse(str(largest)) == largest


@given(
    attempt=st.integers(1, 99_999_999),
    checkpoint=st.integers(0, 9_999_999_999),
    subtask=st.integers(0, 32_767),
)
def test_transaction_id_is_read_back_as_written(
    attempt: int, checkpoint: int, subtask: int
) -> None:
    written = ids.TransactionId("job.sink", attempt, checkpoint, subtask)
    assert ids.TransactionId.parse(str(written)) == written


@pytest.mark.parametrize(
    "foreign",
    ["", "job", "a/1/2/3", "a/1/2/3/4/5", "a b/1/2/3/0", "a/x/2/3/0", "é/1/2/3/0", "a/1/2/3/0\n"],
)
def test_name_of_somebody_else_is_nobodys_transaction(foreign: str) -> None:
    """S25: other programs prepare transactions in the same database."""
    assert ids.TransactionId.parse(foreign) is None


@pytest.mark.parametrize("sink_id", ["", "a/b", "s" * 33, "a b"])
def test_sink_id_that_cannot_be_read_back_is_refused(sink_id: str) -> None:
    with pytest.raises(ValueError, match="transaction id"):
        ids.TransactionId(sink_id, 1, 1, 0)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((100_000_000, 1, 0), r"attempt 100000000, which is not within 0\.\.99999999"),
        ((1, -1, 0), r"checkpoint -1, which is not within 0\.\.9999999999"),
        ((1, 1, 100_000), r"subtask 100000, which is not within 0\.\.99999"),
        ((1, 1, 0, 10_000), r"sequence 10000, which is not within 0\.\.9999"),
    ],
)
def test_number_that_does_not_fit_a_transaction_id_is_named(
    numbers: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        ids.TransactionId("job.sink", *numbers)
    assert "sink id" not in str(raised.value)


@given(names, names, names, names)
def test_two_sinks_never_share_an_id(job: str, uid: str, other_job: str, other_uid: str) -> None:
    """L16: neither by truncation nor by where the dot stands."""
    first, second = ids.sink_id_of(job, uid), ids.sink_id_of(other_job, other_uid)
    assert (first == second) == ((job, uid) == (other_job, other_uid))
    assert len(first) <= ids.SINK_ID_LENGTH_MAX
    assert ids.TransactionId.parse(str(ids.TransactionId(first, 1, 1, 0))) is not None


def test_dot_in_a_job_does_not_make_it_another_jobs_sink() -> None:
    assert ids.sink_id_of("a.b", "c") != ids.sink_id_of("a", "b.c")


def test_subtask_is_printed_as_people_write_it() -> None:
    assert str(ids.SubtaskRef("ledger", 3)) == "ledger[3]"


def test_invariants_hold_under_optimisation_too() -> None:
    require(True, "holds")
    with pytest.raises(InvariantViolation, match="broken"):
        require(False, "broken")
    with pytest.raises(InvariantViolation, match="no case for 3"):
        unreachable(3)  # type: ignore[arg-type]


def test_transaction_has_a_name_of_its_own_within_any_length() -> None:
    one = ids.TransactionId("ledger.postgres-of-the-accounts", 12, 345, 6)
    other = ids.TransactionId("ledger.postgres-of-the-account", 12, 345, 6)
    assert one.name() == str(one)
    assert one.name(separator="-") == "ledger.postgres-of-the-accounts-12-345-6-0"
    names = {each.name(length_max=30) for each in (one, other)}
    assert len(names) == 2
    assert all(len(name) <= 30 and name.endswith("/12/345/6/0") for name in names)
    with pytest.raises(ValueError, match="cannot be shortened to 9 characters"):
        one.name(length_max=20)


def test_writer_names_what_it_prepares_before_it_knows_the_checkpoint() -> None:
    context = WriterContext("job", "uid", "sink", 2, 4, ids.AttemptId(3), ids.CheckpointId(8))
    names = TransactionNamer(context)
    assert [str(names.next()) for _ in range(2)] == ["sink/3/8/2/0", "sink/3/8/2/1"]
    names.advance_past(ids.CheckpointId(10))
    assert names.next() == context.transaction(ids.CheckpointId(11))
