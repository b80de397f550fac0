"""The shipped suite over every backend there is: ours, and one of another package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.support.counting_backend import CountingBackend, ForgetfulBackend

from onceflow import HeapBackend, RocksDBBackend, StateBackend
from onceflow.connectors import ConnectorCatalog
from onceflow.connectors.catalog import STATE_BACKENDS
from onceflow.integration.conformance.state_programs import StateProgram
from onceflow.testing import StateBackendConformance

BACKENDS: dict[str, StateBackend] = {
    "heap": HeapBackend(),
    "rocksdb": RocksDBBackend(cache_entries=16),
}


@pytest.fixture
def installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ConnectorCatalog[type[StateBackend]]:
    """The backends when a distribution is installed that brings one by its entry point."""
    information = tmp_path / "site" / "acme_state-1.2.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-state\nVersion: 1.2\n")
    (information / "entry_points.txt").write_text(
        "[onceflow.state_backends]\ncounting = tests.support.counting_backend:CountingBackend\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    return ConnectorCatalog(STATE_BACKENDS.kind, STATE_BACKENDS.group, STATE_BACKENDS.accepts)


class TestHeap(StateBackendConformance):
    def make_backend(self) -> StateBackend:
        return BACKENDS["heap"]


class TestRocksDB(StateBackendConformance):
    def make_backend(self) -> StateBackend:
        return BACKENDS["rocksdb"]


class TestAnothersByItsEntryPoint(StateBackendConformance):
    @pytest.fixture(autouse=True)
    def found(self, installed: ConnectorCatalog[type[StateBackend]]) -> None:
        self.backend = installed.find("counting")()

    def make_backend(self) -> StateBackend:
        assert isinstance(self.backend, CountingBackend)
        return self.backend


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]
)
def test_programs_switch_between_all_backends(seed: int, tmp_path: Path) -> None:
    backends = [*BACKENDS.values(), CountingBackend(), RocksDBBackend(incremental=False)]
    StateProgram(backends[seed % 4 :] + backends[: seed % 4], tmp_path, seed).run(800)


def test_a_backend_that_forgets_is_found_out(tmp_path: Path) -> None:
    program = StateProgram([ForgetfulBackend()], tmp_path, 1)
    with pytest.raises(AssertionError, match="where .* is right"):
        program.run(300)
    program.close()
