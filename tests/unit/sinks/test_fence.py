"""Tests the permission to write under a sink id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.core.errors import ConfigError, Fenced
from onceflow.sinks.base.checks import FenceOwner, check_fence

_OWNERS = st.builds(FenceOwner, st.sampled_from(["log-1", "log-2"]), st.integers(1, 5))


def _admitted(recorded: FenceOwner | None, claimant: FenceOwner) -> bool:
    try:
        check_fence("app", recorded, claimant, take_over="DELETE …")
    except (ConfigError, Fenced):
        return False
    return True


@given(st.lists(_OWNERS, max_size=20))
def test_whoever_is_admitted_continues_the_same_log_with_a_newer_attempt(
    claims: list[FenceOwner],
) -> None:
    recorded: FenceOwner | None = None
    for claimant in claims:
        if _admitted(recorded, claimant):
            if recorded is not None:
                assert claimant.log_id == recorded.log_id
                assert claimant.attempt > recorded.attempt
            recorded = claimant
        else:
            assert recorded is not None
            assert claimant.log_id != recorded.log_id or claimant.attempt <= recorded.attempt


@pytest.mark.parametrize(
    ("job", "remedy"),
    [
        ("ledger", r"the same job, in another checkpoint storage.*with its former storage"),
        ("other", r"Two jobs.*If this is the same job under a new name.*name='ledger'"),
    ],
)
def test_other_log_is_named_by_its_job_and_attempt(job: str, remedy: str) -> None:
    recorded, claimant = FenceOwner("log-1", 3, "ledger"), FenceOwner("log-2", 9, job)
    facts = r"'app'.*'log-1' of job 'ledger' \(attempt 3\).*'log-2'"
    with pytest.raises(ConfigError, match=f"{facts}.*{remedy}.*DELETE …"):
        check_fence("app", recorded, claimant, take_over="DELETE …")


@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_attempt_that_is_not_newer_is_fenced(attempt: int) -> None:
    with pytest.raises(Fenced, match=f"attempt {attempt} .*attempt 3"):
        check_fence("app", FenceOwner("l", 3), FenceOwner("l", attempt), take_over="")
