"""Tests that need a server go to the process that runs it."""

from __future__ import annotations

import pytest
from tests.sharing import rank, servers_of


def test_servers_are_known_by_the_ids_of_tests() -> None:
    module = "tests/integration/test_kafka_discovery_on_spark.py"
    assert servers_of([f"{module}::test_x", f"{module}::test_y[MySQL-two_phase]"]) == {
        *("kafka", "spark", "mysql")
    }
    assert servers_of(["tests/unit/sources/test_kafka_value_formats.py::test_x"]) == frozenset()


@pytest.mark.parametrize(
    ("own", "others", "order"),
    [
        # A process with Spark: what needs Spark, then what needs nothing, then what starts anew.
        ({"spark"}, {"kafka"}, ["spark", "", "mysql", "spark kafka", "kafka"]),
        # One that has nothing starts what nobody has.
        (set[str](), {"spark", "kafka"}, ["", "mysql", "kafka", "spark", "spark kafka"]),
    ],
)
def test_a_process_begins_with_what_only_it_has_and_ends_with_what_would_start_again(
    own: set[str], others: set[str], order: list[str]
) -> None:
    kinds = ["kafka", "spark kafka", "", "spark", "mysql"]
    kinds.sort(key=lambda names: rank(names.split(), own, others))
    assert kinds == order
