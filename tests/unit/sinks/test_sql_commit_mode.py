"""Which commit mode is chosen for whom, and what is said of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from onceflow.core.errors import ConfigError, StagingMissing
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import CommitterContext
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import PostgresSink
from onceflow.sinks.sql.dialect import DATABASE, TwoPhaseSupport
from onceflow.sinks.sql.settings import CommitMode, choose_mode

LOG = logging.getLogger("onceflow.sinks.test")
FINE = TwoPhaseSupport("it prepares")
IMPOSSIBLE = TwoPhaseSupport(
    "it prepares", obstacles=(DATABASE.problem("it is off", "on", "SET on"),)
)
UNWISE = TwoPhaseSupport(
    "it prepares", drawbacks=(DATABASE.warning("a pooler stands there", "", ""),)
)


def _chosen(
    tmp_path: Path, asked: CommitMode | None, found: TwoPhaseSupport, *, staged: bool = True
) -> CommitMode:
    sink = PostgresSink("postgresql://h/d", table="t", commit_mode=asked.value if asked else "auto")
    settings = sink.settings
    staging = FileStagingArea.in_directory(str(tmp_path), "s") if staged else None
    context = CommitterContext("job", "uid", "s", AttemptId(1), staging=staging)
    return choose_mode(settings, context, lambda: found, LOG)


@pytest.mark.parametrize(
    ("found", "mode", "why"),
    [
        (FINE, CommitMode.TWO_PHASE, "it prepares"),
        (IMPOSSIBLE, CommitMode.LEDGER, "it is off"),
        (UNWISE, CommitMode.LEDGER, "a pooler stands there"),
    ],
)
def test_auto_goes_by_what_is_found_and_says_why(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    found: TwoPhaseSupport,
    mode: CommitMode,
    why: str,
) -> None:
    caplog.set_level(logging.INFO, LOG.name)
    assert _chosen(tmp_path, None, found) is mode
    assert f"sink s: commit_mode auto chose {mode.value}: {why}" in caplog.text


def test_auto_without_storage_needs_two_phase(tmp_path: Path) -> None:
    assert _chosen(tmp_path, None, UNWISE, staged=False) is CommitMode.TWO_PHASE
    with pytest.raises(StagingMissing, match=r"no storage was given.*it is off; .* Fix: SET on$"):
        _chosen(tmp_path, None, IMPOSSIBLE, staged=False)
    with pytest.raises(StagingMissing, match="'two_phase' use it: leave that out"):
        _chosen(tmp_path, CommitMode.TWO_PHASE, IMPOSSIBLE, staged=False)


def test_what_the_user_chose_is_done_or_refused_and_never_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert _chosen(tmp_path, CommitMode.LEDGER, FINE) is CommitMode.LEDGER
    assert _chosen(tmp_path, CommitMode.TWO_PHASE, UNWISE) is CommitMode.TWO_PHASE
    assert "but a pooler stands there" in caplog.text
    with pytest.raises(ConfigError, match="database 'd' .* cannot do .* it is off"):
        _chosen(tmp_path, CommitMode.TWO_PHASE, IMPOSSIBLE)
    with pytest.raises(ConfigError, match="keeps rows in checkpoint storage"):
        _chosen(tmp_path, CommitMode.LEDGER, FINE, staged=False)
