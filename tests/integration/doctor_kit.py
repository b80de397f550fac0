"""`onceflow doctor`, run in this process."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from tests.integration.sql.databases import SECRETS
from typer.testing import CliRunner

from onceflow.cli.main import app

PASSWORD = "hunter2-correct-horse"
Findings: TypeAlias = list[dict[str, str]]


def examine(*arguments: str) -> tuple[int, Findings]:
    """Return how it ended and what it found of servers; no password is in either."""
    outcome = CliRunner().invoke(app, ["doctor", "--json", "--no-spark", *arguments])
    assert not [secret for secret in (PASSWORD, *SECRETS) if secret in outcome.output]
    assert outcome.stdout, outcome.stderr
    printed: Any = json.loads(outcome.stdout)
    assert printed["ok"] == (outcome.exit_code == 0)
    found: Findings = printed["findings"]
    return outcome.exit_code, [one for one in found if one["area"] not in ("java", "python")]


def worst(findings: Findings) -> Findings:
    """Return what there is to fix."""
    return [finding for finding in findings if finding["level"] != "ok"]
