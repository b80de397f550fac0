"""The warnings about a slot, by what the server says about it, and the owners of slots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import pytest

from onceflow.clients.postgres.connection import PostgresSession
from onceflow.core.errors import ConfigError
from onceflow.core.spi import Split
from onceflow.sources.postgres.left_slots import SlotOwner, owners_by_slot
from onceflow.sources.postgres.position import SlotPosition
from onceflow.sources.postgres.slot import check_server
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
        (replace(_WELL, wal_status="extended"), ["extended"], "100 MiB of WAL, more than max_wal"),
        (replace(_WELL, safe_bytes=249 * _MB), ["nearly lost"], "after 249 MiB more"),
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


def test_during_a_first_copy_the_advice_is_to_wait_for_its_end() -> None:
    facts = replace(_WELL, wal_status="extended")
    (warning,) = facts.list_warnings(is_copying=True)
    assert warning.text.endswith("The slot moves when the first copy is finished")


@dataclass
class _Server:
    server_version: int


@pytest.mark.parametrize("version", [90600, 130023])
def test_a_server_older_than_14_is_refused_by_its_version(version: int) -> None:
    server = cast("PostgresSession", _Server(version))
    with pytest.raises(ConfigError, match=f"PostgreSQL {version // 10000} is too old; needed: 14"):
        check_server(server)


def test_the_splits_of_a_stored_job_name_the_owners_of_its_slots() -> None:
    position = SlotPosition("s", "1", 1, 100, ())
    splits = [("in", position.to_split()), ("topic", Split("0", b"12"))]
    assert owners_by_slot("job", splits) == {"s": SlotOwner("job", "in")}
