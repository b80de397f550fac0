"""The measurements of checkpoints, decisions and recoveries, beside the speed of whole jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rich.table import Table

from benchmarks.backlog import BacklogCheckpoints
from benchmarks.driver_kill import driver_steps_of
from benchmarks.job_spec import DriverRecovery, Recovery
from benchmarks.recovery import steps_of
from benchmarks.spread import Spread
from benchmarks.tables import figure_table


@dataclass(slots=True)
class Durability:
    """Empty of all that was not asked for."""

    slot_recoveries: list[Recovery] = field(default_factory=list[Recovery])
    driver_recoveries: list[DriverRecovery] = field(default_factory=list[DriverRecovery])
    backlog: BacklogCheckpoints | None = None

    def as_json(self) -> dict[str, object]:
        """Return its part of the object that `--json` prints."""
        return {
            "recovery_s": _as_json(steps_of(self.slot_recoveries)),
            "driver_recovery_s": _as_json(driver_steps_of(self.driver_recoveries)),
            "backlog": asdict(self.backlog) if self.backlog else {},
        }

    def tables(self) -> list[Table]:
        """Return a table for each kind of measurement that was made."""
        tables: list[Table] = []
        if self.slot_recoveries:
            tables.append(_recovery_table(self.slot_recoveries))
        if self.driver_recoveries:
            tables.append(_driver_recovery_table(self.driver_recoveries))
        if self.backlog:
            tables.append(_backlog_table(self.backlog))
        return tables


def _as_json(steps: dict[str, Spread]) -> dict[str, object]:
    return {step: spread.as_json() for step, spread in steps.items()}


def _recovery_table(recoveries: Sequence[Recovery]) -> Table:
    """Return the steps of the recovery."""
    table = figure_table("SIGKILL of a slot, seconds from the kill", "step", "seconds")
    for step, spread in steps_of(recoveries).items():
        table.add_row(step, spread.shown(2))
    return table


def _driver_recovery_table(recoveries: Sequence[DriverRecovery]) -> Table:
    """Return the steps of a driver that goes on with the job of a killed one."""
    table = figure_table(
        "SIGKILL of the driver, seconds from the new process's start", "step", "seconds"
    )
    for step, spread in driver_steps_of(recoveries).items():
        table.add_row(step, spread.shown(2))
    return table


def _backlog_table(backlog: BacklogCheckpoints) -> Table:
    """Return how long checkpoints took while rows waited."""
    table = figure_table(
        f"Checkpoints under a backlog of {backlog.backlog_s:.0f} s", "barriers", "seconds", "kB"
    )
    table.add_row("that wait", f"{backlog.aligned_s:.1f}", "")
    in_flight_kb = f"{backlog.in_flight_bytes / 1e3:,.0f}"
    table.add_row("that overtake", Spread.of(backlog.overtaking_s).shown(2), in_flight_kb)
    return table
