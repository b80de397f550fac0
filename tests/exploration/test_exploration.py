from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial

import pytest
from tests.exploration.canonical import Codes, copy_of
from tests.exploration.mistakes import MISTAKES, NOT_EXPRESSED, Mistake, find_reason
from tests.exploration.patches import running
from tests.exploration.runs import explore
from tests.exploration.search import Limits, search
from tests.exploration.system import System
from tests.exploration.worlds import WORLDS, World
from tests.simulation.mutants import MUTANTS
from tests.simulation.variant import Variant

BY_NAME = {world.name: world for world in WORLDS}
ONE_SLOT = BY_NAME["one slot"]
TWO_SLOTS = BY_NAME["two slots"]
EXCHANGE = BY_NAME["exchange"]
ONE_CHANNEL = replace(EXCHANGE, slots=1, sink_slots=1, checkpoints=0, faults=1)
SAVEPOINT = BY_NAME["savepoint"]


class TestWorlds:
    def test_every_state_without_faults_holds(self) -> None:
        result = explore(replace(ONE_SLOT, faults=0))
        assert (result.violation, result.is_complete) == ("", True)
        assert result.states > 100

    def test_barriers_overtake_rows(self) -> None:
        world = replace(EXCHANGE, checkpoints=0, overtakes=True)
        assert not explore(world, limits=Limits(states=500)).violation

    def test_a_limit_is_reported(self) -> None:
        result = explore(ONE_SLOT, limits=Limits(states=50))
        assert result.is_cut_off
        assert not result.is_wrong

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
    def test_every_state_holds(self, world: World) -> None:
        result = explore(world)
        assert (result.violation, result.is_complete) == ("", True)


class TestReduction:
    """Orders of steps that are left out lead to the same ends."""

    def test_without_faults(self) -> None:
        _compare_ends(replace(ONE_SLOT, faults=0))

    def test_two_slots_without_faults(self) -> None:
        _compare_ends(replace(TWO_SLOTS, faults=0))

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_with_a_fault(self) -> None:
        _compare_ends(ONE_SLOT)

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_with_an_exchange(self) -> None:
        _compare_ends(replace(EXCHANGE, checkpoints=0))

    @pytest.mark.parametrize("checkpoints", [0, 1])
    def test_with_a_channel_that_barriers_overtake(self, checkpoints: int) -> None:
        _compare_ends(replace(ONE_CHANNEL, faults=0, checkpoints=checkpoints, overtakes=True))

    def test_with_a_channel_and_a_fault(self) -> None:
        _compare_ends(ONE_CHANNEL)

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_with_two_channels_and_a_fault(self) -> None:
        _compare_ends(replace(EXCHANGE, sink_slots=1, checkpoints=0, faults=1))

    def test_with_a_savepoint(self) -> None:
        _compare_ends(replace(SAVEPOINT, faults=0))


def _compare_ends(world: World) -> None:
    with running(Variant()):
        reduced, whole = (
            search(System(replace(world, reduces=reduces), Variant())) for reduces in (True, False)
        )
    assert reduced.ends == whole.ends
    assert reduced.states < whole.states


class TestMistakes:
    @pytest.mark.parametrize(
        ("name", "violation"),
        [
            (
                "commits at pre-commit, before the decision",
                "something is visible that is not decided",
            ),
            (
                "records the position one too late",
                "a decision loses a row: it is before the barrier, and neither visible nor listed",
            ),
            ("waits for a dead slot", "nothing can happen any more, and the job is not finished"),
        ],
    )
    def test_a_mistake_breaks_a_law(self, name: str, violation: str) -> None:
        result = explore(ONE_SLOT, Mistake(name, "one slot"))
        assert result.violation == violation
        assert result.trace[0] == "driver 0 starts"

    def test_each_variant_of_the_simulator_is_caught_or_has_a_reason(self) -> None:
        caught = {mistake.name for mistake in MISTAKES}
        assert not caught & NOT_EXPRESSED.keys()
        left = [v.name for v in MUTANTS if v.name not in caught and find_reason(v) is None]
        assert left == []

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
    def test_each_mistake_breaks_a_law(self, mistake: Mistake) -> None:
        result = explore(BY_NAME[mistake.world], mistake)
        assert result.violation
        assert not result.is_wrong


class _Box:
    def __init__(self, content: object) -> None:
        self.content = content


class TestCodes:
    def test_equal_content_has_one_code(self) -> None:
        codes = Codes()
        assert codes.code(_Box({1: {2}, 3: {4}})) == codes.code(_Box({3: {4}, 1: {2}}))
        assert codes.code(_Box([1, 2])) != codes.code(_Box([2, 1]))
        assert codes.code(_Box(1)) != codes.code(_Box(True))

    def test_a_copy_shares_nothing_that_changes(self) -> None:
        numbers = deque([1])
        twice = [_Box(numbers)] * 2
        first, second = copy_of(twice)
        assert first is second
        assert first.content == numbers
        assert first.content is not numbers

    def test_functions_keep_their_arguments(self) -> None:
        codes = Codes()
        assert codes.code(_Box(partial(int, "1"))) != codes.code(_Box(partial(int, "2")))
