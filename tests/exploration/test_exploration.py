from dataclasses import replace

import pytest
from tests.exploration.mistakes import MISTAKES, Mistake
from tests.exploration.patches import running
from tests.exploration.runs import explore
from tests.exploration.search import Limits, search
from tests.exploration.system import System
from tests.exploration.worlds import WORLDS
from tests.simulation.variant import Variant

ONE_SLOT = WORLDS[0]


class TestWorlds:
    def test_every_state_without_faults_holds(self) -> None:
        result = explore(replace(ONE_SLOT, faults=0))
        assert (result.violation, result.is_complete) == ("", True)
        assert result.states > 100

    def test_a_limit_is_reported(self) -> None:
        result = explore(ONE_SLOT, limits=Limits(states=50))
        assert result.is_cut_off
        assert not result.is_wrong


class TestReduction:
    def test_the_same_ends_are_reached_with_and_without(self) -> None:
        world = replace(ONE_SLOT, faults=0)
        ends: list[object] = []
        for reduces in (True, False):
            with running(Variant()):
                system = System(replace(world, reduces=reduces), Variant())
                ends.append(search(system).ends)
        assert ends[0] == ends[1]


class TestMistakes:
    @pytest.mark.parametrize("mistake", MISTAKES[:1], ids=lambda mistake: mistake.name)
    def test_a_mistake_breaks_a_law(self, mistake: Mistake) -> None:
        result = explore(ONE_SLOT, mistake)
        assert result.violation == "something is visible that is not decided"
        assert result.trace[-1].endswith("commits db/1/1/0/0")
