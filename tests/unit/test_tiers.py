"""The rules by which tests are left out of the default run name tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.tiers import KEPT, LEFT_OUT, ON_MYSQL, is_left_out

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("rule", [*LEFT_OUT, *ON_MYSQL, *KEPT])
def test_every_rule_names_a_module_and_a_test_of_it(rule: str) -> None:
    module, _, test = rule.partition("::")
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert any(name.startswith(test.partition("[")[0] or "test_") for name in names)


def test_a_twin_on_another_database_is_left_out_and_what_is_mysqls_own_is_not() -> None:
    shared, own = "tests/integration/sql/test_sql_sink.py::test_x", ON_MYSQL[0] + "test_x"
    assert is_left_out(f"{shared}[mysql-two_phase]")
    assert not is_left_out(f"{shared}[postgres-two_phase]")
    assert not is_left_out(f"{own}[mysql]")
