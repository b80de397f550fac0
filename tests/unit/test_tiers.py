"""The default run stays within its budget; the rules that leave tests out name what exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from tests.budget import BUDGET_S, LONG_S, Durations, default_run
from tests.conformance.conftest import OPERATORS
from tests.tiers import COSTLY, KEPT, LEFT_OUT, ON_MYSQL, SIBLINGS, has_all_folders, is_left_out

ROOT = Path(__file__).parents[2]


@cache
def names_of_tests(module: str) -> tuple[str, ...]:
    return tuple(re.findall(r"^ *def (test_\w+)", (ROOT / module).read_text("utf-8"), re.MULTILINE))


def test_every_rule_names_a_module_and_a_test_of_it() -> None:
    for rule in [*LEFT_OUT, *SIBLINGS, *COSTLY, *ON_MYSQL, *KEPT]:
        module, _, test = rule.partition("::")
        begin = test.partition("[")[0]
        assert any(name.startswith(begin) for name in names_of_tests(module)), rule


def test_a_twin_on_another_database_is_left_out_and_what_is_mysqls_own_is_not() -> None:
    shared, own = "tests/integration/sql/test_sql_sink.py::test_x", ON_MYSQL[0] + "test_x"
    assert is_left_out(f"{shared}[mysql-two_phase]")
    assert not is_left_out(f"{shared}[postgres-two_phase]")
    assert not is_left_out(f"{own}[mysql]")


@pytest.fixture
def of_default_run(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """Return the tests of the default run, in a run that collects all tests."""
    if not has_all_folders(item.nodeid for item in request.session.items):
        pytest.skip("not all tests were asked for")
    return default_run(request.session.items)


def test_a_parameter_that_is_left_out_exists_and_has_a_sibling_in_the_default_run(
    request: pytest.FixtureRequest, of_default_run: list[pytest.Item]
) -> None:
    by_default = {item.nodeid.partition("[")[0] for item in of_default_run}
    assert [rule for rule in SIBLINGS if rule.partition("[")[0] not in by_default] == []
    run = [item.nodeid for item in request.session.items]
    # Of a run without `servers` they are no part.
    if any(is_left_out(node_id) for node_id in run):
        assert [rule for rule in SIBLINGS if not any(one.startswith(rule) for one in run)] == []


def test_each_operator_has_a_test_of_each_backend_by_default(
    of_default_run: list[pytest.Item],
) -> None:
    names = [(item.path.name, item.name) for item in of_default_run]
    for module, end in OPERATORS.items():
        on_heap = [name for path, name in names if path == module and re.search(r"\[heap\b", name)]
        assert len(on_heap) == 1, (module, end)
        assert any(path == module and "[rocksdb-" in name for path, name in names), module


def test_the_default_run_is_within_its_budget(of_default_run: list[pytest.Item]) -> None:
    sum_s = Durations.read().sum_s(item.nodeid for item in of_default_run)
    assert sum_s <= BUDGET_S, "make tests cheaper, or mark them `servers` or `slow`"


def test_a_long_test_of_the_default_run_is_the_one_proof_of_what_it_shows(
    of_default_run: list[pytest.Item],
) -> None:
    seconds = Durations.read().by_test
    unmarked = [
        item.nodeid
        for item in of_default_run
        if seconds.get(item.nodeid, 0.0) > LONG_S and not item.get_closest_marker("only_proof")
    ]
    assert unmarked == [], "mark them `servers` or `slow`; else `only_proof`, with what they prove"


def test_a_record_has_long_tests_by_name_and_the_sum_of_all_else(tmp_path: Path) -> None:
    record = tmp_path / "durations.json"
    taken = {"tests/a.py::test_x[1]": 12.34, "tests/a.py::test_y": 1.02, "tests/b.py::test_z": 0.5}
    Durations(taken, others_s=2.0).write("by hand", record)
    found = Durations.read(record)
    assert found.by_test == {"tests/a.py::test_x[1]": 12.3, "tests/a.py::test_y": 1.0}
    assert found.others_s == 2.5
    assert found.sum_s(["tests/a.py::test_x[1]", "tests/b.py::test_z"]) == pytest.approx(14.8)
