"""When a commit is tried again."""

from __future__ import annotations

import pytest

from onceflow.core.commit.retries import CommitRetryPolicy


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial_delay_s": 0.0},
        {"max_delay_s": 0.01},
        {"multiplier": 0.5},
        {"deadline_s": -1.0},
    ],
)
def test_policies_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        CommitRetryPolicy(**wrong)  # type: ignore[arg-type]
