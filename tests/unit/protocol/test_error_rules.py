"""Every error class says what it does to a job at a first start and later; both are followed."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from onceflow.core import errors
from onceflow.core.errors import (
    BadRow,
    ConfigError,
    InvariantViolation,
    SettingsRefused,
    SinkError,
    SlotLost,
)
from onceflow.core.protocol.failures import (
    RULES,
    Consequence,
    EndJob,
    JobFailures,
    find_rule,
    is_final,
)
from onceflow.core.protocol.restart import ExponentialDelay, GiveUp, RestartAfter
from onceflow.core.storage.filesystems.filesystem import StorageRefused

ROOT = Path(__file__).parents[3]
_CLASS = re.compile(r"^class (\w+)\(([^)]*)\)", re.MULTILINE)
_WORD = re.compile(r"\w+")
ROOMS = ("core", "clients", "connectors", "formats", "sources", "sinks")
"""Not the command line, which runs no attempt."""
FOR_EVER = ExponentialDelay(initial_delay_s=1.0, multiplier=1.0, jitter=0.0, same_mistakes=2)


def public_errors() -> set[str]:
    """Return the names of the public error classes that a job may meet, from the source text."""
    bases: dict[str, set[str]] = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for name, above in _CLASS.findall(path.read_text(encoding="utf-8")):
                bases.setdefault(name, set()).update(_WORD.findall(above))
    known = {"OnceflowError", "InvariantViolation"}
    while more := {name for name, above in bases.items() if above & known} - known:
        known |= more
    return {name for name in known if not name.startswith("_")}


def test_every_public_error_class_has_a_row_and_every_row_a_class() -> None:
    names = public_errors()
    assert names - RULES.keys() == set()
    assert RULES.keys() - names == {"Exception"}


@pytest.mark.parametrize("name", RULES)
def test_an_error_that_is_final_later_is_final_at_the_first_start(name: str) -> None:
    rule = RULES[name]
    if rule.later is Consequence.FINAL:
        assert rule.first_start is Consequence.FINAL


def test_what_an_error_class_says_of_itself_is_the_row_of_its_first_start() -> None:
    classes = [getattr(errors, name) for name in errors.__all__ if name != "InvariantViolation"]
    differing = [
        error.__name__
        for error in classes
        if (error.retry == "never") is not (find_rule(error).first_start is Consequence.FINAL)
    ]
    assert differing == []


class OfAUser(SinkError):
    """An error class that a connector of the user's has defined."""


@pytest.mark.parametrize(
    ("error", "at_first", "later"),
    [
        (ConfigError("a table is missing"), True, False),
        (SettingsRefused("password authentication failed"), True, False),
        (StorageRefused("access denied"), True, False),
        (OSError(-2, "Name or service not known"), True, False),
        (SlotLost("slot 0"), False, False),
        (OfAUser("no answer"), False, False),
        (BadRow("amount"), True, True),
        (InvariantViolation("commits before its decision"), True, True),
        (KeyboardInterrupt(), True, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_only_what_the_environment_can_fix_is_tried_again_once_the_job_has_run(
    error: BaseException, at_first: bool, later: bool
) -> None:
    assert (is_final(error, has_run=False), is_final(error, has_run=True)) == (at_first, later)


def test_the_same_refusal_before_an_attempt_runs_is_no_mistake_of_the_program() -> None:
    failures = _failures_of_a_job_that_has_run()
    for second in range(10):
        failures.begin_attempt()
        verdict = failures.on_failure(ConfigError("no table"), "no table", "print", float(second))
        assert isinstance(verdict, RestartAfter)


def test_the_same_mistake_of_attempts_that_run_ends_the_job() -> None:
    failures = _failures_of_a_job_that_has_run()
    failures.begin_attempt()
    failures.on_running(1.0)
    assert isinstance(_fail(failures, ConfigError("two timers")), RestartAfter)
    failures.begin_attempt()
    failures.on_running(2.0)
    assert isinstance(_fail(failures, ConfigError("two timers")), GiveUp)


def test_a_first_attempt_that_never_ran_leaves_the_next_one_a_first_start() -> None:
    failures = JobFailures(FOR_EVER.tracker(random.Random(1)))
    assert isinstance(_fail(failures, SlotLost("slot 0")), RestartAfter)
    assert isinstance(_fail(failures, ConfigError("no table")), EndJob)


def test_an_outage_is_told_by_its_first_error_and_ends_with_a_checkpoint() -> None:
    failures = _failures_of_a_job_that_has_run()
    failures.on_failure(SlotLost("slot 1"), "SlotLost: slot 1\n  trace", "", 100.0)
    assert failures.describe("SlotLost: slot 1", 100.0) == "SlotLost: slot 1"
    failures.on_failure(ConfigError("no table"), "no table", "", 160.0)
    assert failures.describe("no table\n  trace", 160.0) == (
        "no table (failure 2 in 60 s without a checkpoint; the first was SlotLost: slot 1)\n  trace"
    )
    failures.on_checkpoint()
    failures.on_failure(ConfigError("no table"), "no table", "", 300.0)
    assert failures.describe("no table", 300.0) == "no table"


def _failures_of_a_job_that_has_run() -> JobFailures:
    failures = JobFailures(FOR_EVER.tracker(random.Random(1)))
    failures.begin_attempt()
    failures.on_running(0.0)
    failures.on_checkpoint()
    return failures


def _fail(failures: JobFailures, error: Exception) -> object:
    return failures.on_failure(error, str(error), str(error), 3.0)
