"""The warnings about a slot, by what the server says about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onceflow.sources.postgres.slot_progress import SlotFacts

_MB = 1024 * 1024
_WELL = SlotFacts(
    name="s",
    wal_end=1000 * _MB,
    server_ms=0,
    restart=900 * _MB,
    confirmed=950 * _MB,
    wal_status="reserved",
    safe_bytes=900 * _MB,
    is_active=True,
    invalidation="",
    inactive_s=None,
    wal_limit_bytes=1000 * _MB,
    idle_limit_s=3600.0,
)


@pytest.mark.parametrize(
    ("facts", "states", "words"),
    [
        (_WELL, [], ""),
        (replace(_WELL, wal_status="extended"), ["extended"], "100 MB of WAL, more than max_wal"),
        (replace(_WELL, safe_bytes=249 * _MB), ["nearly lost"], "after 249 MB more"),
        (
            replace(_WELL, wal_status="extended", safe_bytes=None, wal_limit_bytes=None),
            ["extended"],
            "without a limit",
        ),
        (
            replace(_WELL, wal_status="unreserved", safe_bytes=-1),
            ["unreserved"],
            "SET max_slot_wal_keep_size = '200MB'",
        ),
        (replace(_WELL, wal_status="lost", restart=None), ["lost"], "lost (wal_removed)"),
        (
            replace(_WELL, wal_status="lost", invalidation="idle_timeout", inactive_s=9000.0),
            ["lost", "idle"],
            "lost (idle_timeout)",
        ),
        (replace(_WELL, inactive_s=1799.0), [], ""),
        (replace(_WELL, inactive_s=1801.0), ["idle"], "for 1801 s, and the server gives it up"),
        (replace(_WELL, inactive_s=1801.0, idle_limit_s=None), [], ""),
    ],
)
def test_a_warning_names_the_state_and_the_advice(
    facts: SlotFacts, states: list[str], words: str
) -> None:
    warnings = list(facts.list_warnings())
    assert [warning.state for warning in warnings] == states
    assert words in "".join(warning.text for warning in warnings)
