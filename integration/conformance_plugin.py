"""The pytest plugin of the conformance kit: options, fixtures, and the table after the run.

pytest loads this module by its entry point in every project that has onceflow installed. So heavy
modules are imported only when a sink or source is tested.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from onceflow.integration.conformance.harness import Effort
    from onceflow.integration.conformance.processes import Processes
    from onceflow.integration.conformance.source_input import SourceInput
    from onceflow.integration.conformance.target import SinkTarget

_PROPERTY = "onceflow_clause"
_VIOLATION = "onceflow.integration.conformance.target.Violation: "
_SUITES = {"--onceflow-sink": "test_sink.py", "--onceflow-source": "test_source.py"}
_NAMED_CLASSES = {"TestNamedSink": "--onceflow-sink", "TestNamedSource": "--onceflow-source"}


@dataclass
class ConformanceTable:
    """The results of the run so far, by sink or source, and by clause."""

    subjects: dict[str, dict[str, dict[str, Any]]] = field(
        default_factory=dict[str, dict[str, dict[str, Any]]]
    )

    def add(self, facts: dict[str, Any]) -> None:
        """Add the result of a clause."""
        self.subjects.setdefault(facts["subject"], {})[facts["clause"]] = facts

    def list_failed(self, subject: str) -> set[str]:
        """Return the clauses of `subject` that failed, or rest on a failed clause."""
        clauses = self.subjects.get(subject, {}).values()
        return {
            str(facts["clause"])
            for facts in clauses
            if facts["verdict"] == "FAILED" or facts["reason"].startswith("rests on")
        }


_COLOURS = {"FAILED": {"red": True}, "not tested": {"yellow": True}}
_TABLE = pytest.StashKey[ConformanceTable]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the kit's options."""
    group = parser.getgroup("onceflow", "onceflow: conformance of sinks and sources")
    group.addoption(
        "--onceflow-sink",
        metavar="MODULE:NAME",
        help="Test the sink whose SinkTarget MODULE:NAME() returns; needs no test file.",
    )
    group.addoption(
        "--onceflow-source",
        metavar="MODULE:NAME",
        help="Test the source whose SourceInput MODULE:NAME() returns; needs no test file.",
    )
    group.addoption(
        "--onceflow-rounds",
        metavar="N",
        type=int,
        default=8,
        help="Kills in the long run of a sink's conformance (default 8; hundreds for a soak).",
    )
    group.addoption(
        "--onceflow-seed",
        metavar="N",
        type=int,
        default=1,
        help="Seed of the schedules of the conformance of a sink or source (default 1).",
    )
    group.addoption(
        "--onceflow-report",
        metavar="FILE",
        help="Write how each clause ended into a JSON file.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect the kit's own tests if their options are given, alone or with named tests."""
    config.stash[_TABLE] = ConformanceTable()
    directory = Path(__file__).parent / "conformance"
    suites = [str(directory / name) for option, name in _SUITES.items() if config.getoption(option)]
    if not suites:
        return
    sys.path.insert(0, str(config.invocation_params.dir))
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args[:] = suites
    else:
        config.args += [suite for suite in suites if suite not in config.args]


def target_of(config: pytest.Config) -> SinkTarget:
    """Return the target that --onceflow-sink names.

    Raises:
        pytest.UsageError: The option does not name a SinkTarget. The message has the reason.
    """
    from onceflow.integration.conformance.target import SinkTarget

    target = _make_named(config, "--onceflow-sink")
    if not isinstance(target, SinkTarget):
        raise pytest.UsageError(
            f"--onceflow-sink {config.getoption('--onceflow-sink')} returned"
            f" {type(target).__name__}; return a SinkTarget, which also says what a reader of the"
            " target sees"
        )
    return target


def input_of(config: pytest.Config) -> SourceInput:
    """Return the input that --onceflow-source names.

    Raises:
        pytest.UsageError: The option does not name a SourceInput. The message has the reason.
    """
    from onceflow.integration.conformance.source_input import SourceInput

    source_input = _make_named(config, "--onceflow-source")
    if not isinstance(source_input, SourceInput):
        raise pytest.UsageError(
            f"--onceflow-source {config.getoption('--onceflow-source')} returned"
            f" {type(source_input).__name__}; return a SourceInput, which also puts rows into the"
            " input"
        )
    return source_input


def _make_named(config: pytest.Config, option: str) -> object:
    named = config.getoption(option)
    if not named:
        raise pytest.UsageError(f"name what to test: {option} MODULE:NAME")
    module, _, name = str(named).partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise pytest.UsageError(f"{option} {named}: {error}") from error
    return make()


@pytest.fixture(scope="session")
def onceflow_processes() -> Iterator[Processes]:
    """The run's processes, which clauses start and kill."""
    from onceflow.integration.conformance.processes import Processes

    with Processes() as processes:
        yield processes


@pytest.fixture(scope="session")
def onceflow_effort(pytestconfig: pytest.Config) -> Effort:
    """The number of rounds and the seed, from the options."""
    from onceflow.integration.conformance.harness import Effort

    seed, rounds = _effort(pytestconfig)
    return Effort(seed=seed, rounds=rounds)


def subject_label(item: pytest.Item) -> str:
    """Return the name of the sink or source that `item` tests: its class and other parameters."""
    others = [str(value) for name, value in _parameters(item).items() if name != "clause"]
    parent = item.getparent(pytest.Class)
    if parent is not None and parent.name in _NAMED_CLASSES:
        named = item.config.getoption(_NAMED_CLASSES[parent.name])
        if named:
            return str(named)
    label = parent.name if parent is not None else item.name
    return f"{label}[{'-'.join(others)}]" if others else label


def list_failed_clauses(config: pytest.Config, subject: str) -> set[str]:
    """Return the clauses of the sink or source `subject` that have failed in this run."""
    return config.stash[_TABLE].list_failed(subject)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of clauses, so that their reports are recognized, even across processes."""
    if "clause" not in _parameters(item):
        return
    from onceflow.integration.conformance.clause import Clause

    clause = _parameters(item)["clause"]
    if isinstance(clause, Clause):
        facts = {
            "subject": subject_label(item),
            "kind": clause.kit.kind,
            "clause": clause.id,
            "says": clause.says,
            "scenarios": list(clause.scenarios),
        }
        item.user_properties.append((_PROPERTY, facts))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the result of a clause to the table before the next clause starts."""
    report = yield
    _enter(item.config.stash[_TABLE], report)
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table, and write the report."""
    table = config.stash[_TABLE]
    for outcome in ("passed", "failed", "skipped", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            if isinstance(report, pytest.TestReport):
                _enter(table, report)
    path: str | None = config.getoption("--onceflow-report")
    if not table.subjects and not path:
        return
    from onceflow.integration.conformance.report import lines_of, report_of

    effort = _effort(config)
    for subject, clauses in table.subjects.items():
        terminalreporter.write_sep("=", f"conformance of {subject}")
        for line, verdict in lines_of(list(clauses.values()), *effort):
            colour = _COLOURS.get(verdict, {})
            terminalreporter.write_line(line, **colour)
    if path:
        Path(path).write_text(json.dumps(report_of(table.subjects, *effort), indent=2) + "\n")


def _enter(table: ConformanceTable, report: pytest.TestReport) -> None:
    facts: Any = dict(report.user_properties).get(_PROPERTY)
    if not isinstance(facts, dict) or (report.when != "call" and report.passed):
        return
    verdict = {"passed": "passed", "failed": "FAILED"}.get(report.outcome, "not tested")
    table.add(
        {
            **facts,
            "verdict": verdict,
            "reason": _reason(report),
            "seconds": round(report.duration, 3),
        }
    )


def _reason(report: pytest.TestReport) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr).removeprefix(_VIOLATION)


def _parameters(item: pytest.Item) -> dict[str, object]:
    callspec = getattr(item, "callspec", None)
    return dict(callspec.params) if callspec is not None else {}


def _effort(config: pytest.Config) -> tuple[int, int]:
    return int(str(config.getoption("--onceflow-seed"))), int(
        str(config.getoption("--onceflow-rounds"))
    )
