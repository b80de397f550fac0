"""An attempt that fails says what happened, and not only who noticed it first."""

from __future__ import annotations

from onceflow.core.errors import ConfigError, SlotFailed
from onceflow.core.protocol.loops.slots import slot_error
from onceflow.core.runtime.cluster.spark import stage_error
from onceflow.core.runtime.messages import fingerprint_of, report_of_failure


def test_an_unknown_error_is_told_by_its_name_and_counts_if_it_is_a_mistake() -> None:
    for error, counts in ((KeyError("id"), False), (TypeError("no such argument"), True)):
        told = slot_error(report_of_failure(1, error))
        assert isinstance(told, SlotFailed)
        assert str(told).startswith(f"slot 1: {type(error).__name__}: ")
        assert bool(told.fingerprint) == counts
        assert fingerprint_of(told) == told.fingerprint


def test_what_a_slot_could_not_start_for_is_told_as_the_mistake_that_it_is() -> None:
    spark = "Job aborted\nTraceback (most recent call last):\n  File ...\n"
    told = stage_error(RuntimeError(f"{spark}onceflow.core.errors.ConfigError: no such file\n\tat"))
    assert isinstance(told, ConfigError)
    assert str(told) == "no such file"
    told = stage_error(RuntimeError(f"{spark}ModuleNotFoundError: No module named 'onceflow'\n"))
    assert isinstance(told, ConfigError)
    assert "'onceflow'" in str(told)
    assert "--py-files" in str(told)
